"""Computes what a job needs with other batch sizes and numbers of ranks, from a few steps.

Batch size and number of ranks change how much each operation allocates, but not the operations. So
the memory after an operation is a polynomial of both: of second degree in the rows of a batch,
because a mask has rows times rows values, and of first degree in the share of a rank.
"""

import logging
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

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
        self._own = (job.shape[0], job.num_ranks)
        self._gpus_of_node = job.gpus_of_node
        rows = job.shape[0]
        if job.is_padded(2):
            # The step of a single row has other operations, because it needs no mask.
            rows = max(rows, 2)
        self._rows = [rows, 2 * rows, 3 * rows]
        self._ranks = [job.num_ranks]
        if not job.has_fixed_ranks:
            several = job.num_ranks
            if several == 1:
                several = GPUS_OF_NODE
            far = max(NUMS_RANKS)
            if several > GPUS_OF_NODE:
                far = 2
            self._ranks = [several, far]
        self._points = []
        for num_rows in self._rows:
            point = (num_rows, self._ranks[0])
            self._points.append(point)
        for num_ranks in self._ranks[1:]:
            point = (rows, num_ranks)
            self._points.append(point)
        self.to_measure = list(dict.fromkeys([self._own, *self._points]))

    def fit(self, steps: Steps) -> None:
        """Take over the measured steps."""
        measured = [steps[point] for point in self._points]
        self._timelines = _align([step.timeline for step in measured])
        self._resident = [step.resident for step in measured]
        self._host = [sum(step.host.values()) for step in measured]
        self._loading = measured[0].loading
        # Not 0 if the job has a single row or rank, and the measured ones have several.
        self._extra_of_own = 0.0
        own_peak = self._peak(*self._own)
        self._extra_of_own = steps[self._own].total - own_peak

    def total(self, num_rows: int, num_ranks: int) -> float:
        """Return the bytes that a rank needs at the peak of a step."""
        peak = self._peak(num_rows, num_ranks)
        resident = float(self._weights(num_rows, num_ranks) @ self._resident)
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
        weights = self._weights(self._rows[0], num_ranks)
        of_rank = float(weights @ self._host)
        ranks_of_node = min(num_ranks, self._gpus_of_node)
        return ranks_of_node * of_rank + self._loading

    def _peak(self, num_rows: int, num_ranks: int) -> float:
        timeline = self._weights(num_rows, num_ranks) @ self._timelines
        peak = float(timeline.max())
        if _is_single(num_rows, num_ranks) == _is_single(*self._own):
            peak += self._extra_of_own
        return peak

    def _weights(self, num_rows: int, num_ranks: int) -> np.ndarray:
        """Return the weight of each point in the value of a polynomial."""
        shares = [1 / ranks for ranks in self._ranks]
        first_by_rows, *by_rows = _lagrange(self._rows, num_rows)
        first_by_ranks, *by_ranks = _lagrange(shares, 1 / num_ranks)
        first = first_by_rows + first_by_ranks - 1
        return np.array([first, *by_rows, *by_ranks])


def _is_single(num_rows: int, num_ranks: int) -> tuple[bool, bool]:
    """Return whether a job needs no mask for its row, and gathers nothing for its rank."""
    return num_rows == 1, num_ranks == 1


def _lagrange(points: Sequence[float], x: float) -> list[float]:
    """Return the weights with which values at the points give the value at x."""
    weights = []
    for point in points:
        weight = 1.0
        for other in points:
            if other == point:
                continue
            weight *= x - other
            weight /= point - other
        weights.append(weight)
    return weights


def _align(timelines: Sequence[list[list[float]]]) -> np.ndarray:
    """Return one row for each timeline, with columns for the same operations.

    A stretch whose number of operations depends on the batch counts with its peak.
    """
    aligned = []
    for stretches in zip(*timelines, strict=True):
        lengths = set(map(len, stretches))
        if len(lengths) == 1:
            aligned.append(np.array(stretches))
        else:
            peaks = [[max(stretch)] for stretch in stretches]
            aligned.append(np.array(peaks))
    return np.concatenate(aligned, axis=1)


def make_table(job: Job, estimate: Estimate, limits: Mapping[float, float]) -> Iterator[dict]:
    """Generate what is known for each number of ranks. Sizes are in GB.

    Args:
        job: the job.
        estimate: of it, fitted.
        limits: {size of a GPU: how much of it may be used}
    """
    numbers = {job.num_ranks}
    if not job.has_fixed_ranks:
        numbers.update(NUMS_RANKS)
    for num_ranks in sorted(numbers):
        largest = {}
        for size, limit in limits.items():
            largest[size] = estimate.largest_batch(limit * 1e9, num_ranks)
        needed = estimate.total(job.shape[0], num_ranks)
        host = estimate.host(num_ranks)
        yield {
            "ranks": num_ranks,
            "largest_batch": largest,
            "gigabytes": needed / 1e9,
            "host_gigabytes": host / 1e9,
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
