"""Computes what a job needs with other batch sizes and numbers of ranks, from a few steps.

Batch size and number of ranks change how much each operation allocates, but not the operations. So
the memory after an operation is a polynomial of both: of second degree in the rows of a batch,
because a mask has rows times rows values, and of first degree in the share of a rank.
"""

import logging
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.tools.plan.job import GPUS_OF_NODE, Job, Request
from hf_fsdp_recipes.tools.plan.step import Step, allowance, measure_step

NUMS_RANKS = (1, 2, 4, 8, 16, 32)
MOST_ROWS = 4096

Steps = Mapping[tuple[int, int], Step]  # {(rows of a batch, number of ranks): its step}


class Estimate:
    """What a rank needs with any batch size and number of ranks.

    Args:
        job: the job.

    Attributes:
        to_measure: (rows of a batch, number of ranks) of the steps that `fit` needs, among them
            that of the job.
    """

    def __init__(self, job: Job) -> None:
        self._rows = [job.shape[0] * factor for factor in (1, 2, 3)]
        self._ranks = [job.num_ranks]
        if not job.has_fixed_ranks:
            several = job.num_ranks if job.num_ranks > 1 else GPUS_OF_NODE
            self._ranks = [several, 2 if several > GPUS_OF_NODE else max(NUMS_RANKS)]
        self._corners = [(rows, self._ranks[0]) for rows in self._rows]
        self._corners += [(self._rows[0], ranks) for ranks in self._ranks[1:]]
        # A single rank gathers nothing, so its step has other operations.
        single = [] if job.has_fixed_ranks else [(self._rows[0], 1)]
        self.to_measure = [*self._corners, *single]

    def fit(self, steps: Steps) -> None:
        """Take over the measured steps."""
        self._steps = [steps[corner] for corner in self._corners]
        self._timelines = _align([step.timeline for step in self._steps])
        self._extra_of_single = 0.0
        single = steps.get((self._rows[0], 1))
        if single is not None:
            self._extra_of_single = sum(single.peak.values()) - self._peak(self._rows[0], 1)

    def total(self, num_rows: int, num_ranks: int) -> float:
        """Return the bytes that a rank needs at the peak of a step."""
        peak = self._peak(num_rows, num_ranks)
        if num_ranks == 1:
            peak += self._extra_of_single
        resident = self._weigh([step.resident for step in self._steps], num_rows, num_ranks)
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
        host = [sum(step.host.values()) for step in self._steps]
        of_rank = self._weigh(host, self._rows[0], num_ranks)
        return min(num_ranks, GPUS_OF_NODE) * of_rank + self._steps[0].loading

    def _peak(self, num_rows: int, num_ranks: int) -> float:
        return float(np.max(self._weigh(self._timelines, num_rows, num_ranks)))

    def _weigh(self, values: Sequence, num_rows: int, num_ranks: int) -> Any:
        """Return the polynomial's value. `values` has one for each corner."""
        by_rows = _lagrange(self._rows, num_rows)
        by_ranks = _lagrange([1 / ranks for ranks in self._ranks], 1 / num_ranks)
        return [by_rows[0] + by_ranks[0] - 1, *by_rows[1:], *by_ranks[1:]] @ np.array(values)


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


def make_table(job: Job, estimate: Estimate, limits: Mapping[float, float]) -> Iterator[dict]:
    """Generate what is known for each number of ranks. Sizes are in GB.

    Args:
        job: the job.
        estimate: of it, fitted.
        limits: {size of a GPU: how much of it may be used}
    """
    numbers = {job.num_ranks} if job.has_fixed_ranks else {*NUMS_RANKS, job.num_ranks}
    for num_ranks in sorted(numbers):
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


def measure_change(request: Request, options: str) -> float | None:
    """Return how many GB a rank of a job needs with further options.

    Return None if they change nothing, or if there can be no such job.
    """
    changed = request.change(options)
    try:
        job = changed.read()
        if job == request.read():
            return None
        return sum(measure(changed).full_peak(job).values()) / 1e9
    except RecipeError:
        return None
