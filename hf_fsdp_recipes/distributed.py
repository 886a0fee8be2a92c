"""Who am I among the ranks, and how do all of them come to the same decision?

Thin names over `torch.distributed` that also work in a single process. Does not start process groups.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes.errors import RecipeError

LAST_WORDS_SECONDS = 3.0  # how long ranks wait for each other's messages where they cannot ask
PATIENCE = timedelta(days=30)  # for work that only one rank does and that may take as long as it takes


def is_distributed() -> bool:
    """Tell whether a process group is up."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the global rank, from the process group or, before there is one, from the launcher."""
    return dist.get_rank() if is_distributed() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks, from the process group or, before there is one, from the launcher."""
    return dist.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Tell whether this is global rank 0."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks. Collective: every rank must call this."""
    if is_distributed():
        dist.barrier()


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank. Collective: every rank must call this."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. Collective: every rank must call this."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_integers(values: torch.Tensor) -> list[list[int]]:
    """Return the values of all ranks, in rank order: one collective, and one wait for the device.

    Collective: every rank must call this.

    Args:
        values: (N,) int64, on the device that the process group works on.
    """
    if not is_distributed():
        return [values.tolist()]
    gathered = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(gathered, values)
    rows: list[list[int]] = torch.stack(gathered).tolist()
    return rows


def print_main(message: str) -> None:
    """Print one line from rank 0; other ranks stay silent."""
    if is_main():
        print(message, flush=True)


def raise_together(error: Exception | None) -> None:
    """Raise the lowest rank's error on every rank, or return on every rank.

    Collective: every rank must call this, with its own error or None.

    Raises:
        RecipeError: the first failing rank's own error, of the same class and text everywhere; an error
            that is not of this package is raised as itself where it happened and as RecipeError elsewhere.
    """
    failures = [(r, report) for r, report in enumerate(gather_objects(_report(error))) if report is not None]
    if failures:
        _raise_as_reported(*failures[0], error)


def _report(error: Exception | None) -> Any:
    return None if error is None else (type(error), str(error), isinstance(error, RecipeError))


def _raise_as_reported(failed_rank: int, report: Any, own_error: Exception | None) -> None:
    kind, message, is_ours = report
    if is_ours:
        ours = kind(message)
        ours.is_agreed = True
        raise ours from own_error
    if own_error is not None:
        raise own_error
    raise RecipeError(f"rank {failed_rank} failed with {kind.__name__}: {message}")


def run_on_main(work: Callable[[], Any]) -> Any:
    """Return on every rank what `work` returns on rank 0.

    Collective: every rank must call this, and the work itself must hold no collective.

    Raises:
        Exception: rank 0's error on every rank, as `raise_together`.
    """
    value, error = None, None
    if is_main():
        try:
            value = work()
        except Exception as caught:
            error = caught
    report, value = broadcast_object((_report(error), value))
    if report is not None:
        _raise_as_reported(0, report, error)
    return value


@contextlib.contextmanager
def sync_errors() -> Iterator[None]:
    """Run a block that may fail on some ranks, then fail on all of them or on none.

    Collective: every rank must enter this, and the block itself must hold no collective.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(error)


def main_first(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, run on rank 0, then on one rank of each other node, then on all the others.

    Collective: every rank must call this, and the work itself must hold no collective. Rank 0 fills a shared cache for
    all, a node's first rank fills one on the node's own disk. Ranks wait over a group of their own: the time-out of
    the default group (ddp_timeout, half an hour unless told otherwise) does not run meanwhile.

    Raises:
        Exception: as `raise_together`; nobody starts on a turn after one that failed.
    """
    if not is_distributed():
        return work()
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    mine = 0 if is_main() else 1 if os.environ.get("LOCAL_RANK", "0") == "0" else 2
    result = None
    for turn in range(3):
        error: Exception | None = None
        try:
            result = work() if turn == mine else result
        except Exception as caught:
            error = caught
        dist.barrier(group)
        raise_together(error)
    dist.destroy_process_group(group)
    return result


@contextlib.contextmanager
def exit_with_message() -> Iterator[None]:
    """Turn an error of this package into one line on stderr and exit status 1, without a traceback."""
    try:
        yield
    except RecipeError as error:
        # One write, line end included, so that the ranks' lines do not run into each other.
        os.write(sys.stderr.fileno(), f"{type(error).__name__}: {error}\n".encode())
        # The launcher ends the others as soon as one leaves; let all of them speak first.
        if error.is_agreed:
            barrier()
        elif world_size() > 1:
            time.sleep(LAST_WORDS_SECONDS)
        sys.exit(1)
