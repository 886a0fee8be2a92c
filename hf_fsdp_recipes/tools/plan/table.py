"""Computes what a job needs with other batch sizes and numbers of ranks, from a few steps.

Batch size and number of ranks change how much each operation allocates, but not the operations. So
the memory after an operation is a polynomial of both: of second degree in the rows of a batch,
because a mask has rows times rows values, and linear in the shard of a rank.
"""

import logging
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.tools.plan.job import GPUS_OF_NODE, Job, Request
from hf_fsdp_recipes.tools.plan.step import Step, allowance, measure_step

NUMS_RANKS = (1, 2, 4, 8, 16, 32)
MOST_ROWS = 4096


class Group(NamedTuple):
    """Jobs that differ only in rows and ranks, and whose steps have the same operations."""

    rows: list[int]  # to be measured with the first number of ranks
    ranks: list[int]  # to be measured with the first number of rows

    @property
    def measured(self) -> list[tuple[int, int]]:
        """(rows, ranks) of each job whose step has to be measured."""
        return [
            *((rows, self.ranks[0]) for rows in self.rows),
            *((self.rows[0], ranks) for ranks in self.ranks[1:]),
        ]


class Estimate:
    """What a rank needs in any job of a group.

    Args:
        group: the jobs.
        steps: of those jobs that were measured.
    """

    def __init__(self, group: Group, steps: Sequence[Step]) -> None:
        self._group = group
        self._steps = steps
        self._timelines = _align([step.timeline for step in steps])

    def total(self, num_rows: int, num_ranks: int) -> float:
        """Return the bytes that a rank needs at the peak of a step."""
        weights = self._weights(num_rows, num_ranks)
        peak = float(np.max(weights @ self._timelines))
        resident = float(weights @ [step.resident for step in self._steps])
        return peak + allowance(peak - resident, num_ranks)

    def largest_batch(self, limit_bytes: float, num_ranks: int) -> int:
        """Return the largest number of rows with which a rank stays below the limit, or 0."""
        return bisect_right(
            range(1, MOST_ROWS),
            limit_bytes,
            key=lambda num_rows: self.total(num_rows, num_ranks),
        )

    def host(self, num_ranks: int) -> float:
        """Return the bytes of host memory that a node needs."""
        weights = self._weights(self._group.rows[0], num_ranks)
        of_rank = float(weights @ [sum(step.host.values()) for step in self._steps])
        return min(num_ranks, GPUS_OF_NODE) * of_rank + self._steps[0].loading

    def _weights(self, num_rows: int, num_ranks: int) -> np.ndarray:
        by_rows = _lagrange(self._group.rows, num_rows)
        by_ranks = _lagrange([1 / ranks for ranks in self._group.ranks], 1 / num_ranks)
        return np.array([by_rows[0] + by_ranks[0] - 1, *by_rows[1:], *by_ranks[1:]])


def find_groups(job: Job) -> list[Group]:
    """Return the groups of jobs in the table of a job. The job is the first of the first group.

    A single rank gathers nothing, so its step has other operations.
    """
    num_rows = job.shape[0]
    rows = [num_rows, 2 * num_rows, 3 * num_rows]
    if job.on_cpu:
        return [Group([num_rows], [job.num_ranks])]
    if job.has_fixed_ranks:
        return [Group(rows, [job.num_ranks])]
    most = max(NUMS_RANKS)
    near = job.num_ranks if job.num_ranks > 1 else GPUS_OF_NODE
    far = most if near < most else 2
    groups = [Group(rows, [near, far]), Group(rows, [1])]
    return groups if job.num_ranks > 1 else groups[::-1]


def _lagrange(points: Sequence[float], x: float) -> list[float]:
    """Return the weights with which values at the points give the value at x."""
    return [
        prod((x - other) / (point - other) for other in points if other != point)
        for point in points
    ]


def _align(timelines: Sequence[list[list[float]]]) -> np.ndarray:
    """Return one row for each timeline, with columns for the same operations.

    A stretch whose number of operations depends on the batch counts with its peak.
    """
    columns = []
    for stretches in zip(*timelines, strict=True):
        lengths = {len(stretch) for stretch in stretches}
        columns.append(stretches if len(lengths) == 1 else [[max(each)] for each in stretches])
    return np.array([list(chain(*row)) for row in zip(*columns, strict=True)])


def rows_of_table(
    job: Job, groups: Sequence[Group], steps: Sequence[Step], limits: Mapping[float, float]
) -> Iterator[dict]:
    """Generate what is known for each number of ranks. Sizes are in GB.

    Args:
        job: the job.
        groups: of the job.
        steps: of all measured jobs of the groups, in order.
        limits: {size of a GPU: how much of it may be used}
    """
    remaining = iter(steps)
    estimates = {}
    for group in groups:
        measured = [next(remaining) for _ in group.measured]
        estimates[group.ranks[0] == 1] = Estimate(group, measured)
    numbers = {job.num_ranks} if job.has_fixed_ranks else {*NUMS_RANKS, job.num_ranks}
    for num_ranks in sorted(numbers):
        estimate = estimates[num_ranks == 1]
        yield {
            "ranks": num_ranks,
            "largest_batch": {
                size: estimate.largest_batch(limit * 1e9, num_ranks)
                for size, limit in limits.items()
            },
            "gigabytes": estimate.total(job.shape[0], num_ranks) / 1e9,
            "host_gigabytes": estimate.host(num_ranks) / 1e9,
        }


def measure(request: Request) -> Step:
    """Return the step of a job. A process of its own runs this."""
    warnings.simplefilter("ignore")
    logging.disable()
    return measure_step(request.read())


def measure_if_possible(request: Request) -> float | None:
    """Return how many GB a rank of a job needs, or None if there can be no such job."""
    try:
        return sum(measure(request).full_peak(request.read()).values()) / 1e9
    except RecipeError:
        return None
