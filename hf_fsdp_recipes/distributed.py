"""Messages between ranks, and errors that all ranks raise together.

Only `host_group` needs a process group. Objects are sent over a separate gloo group.
They never go through an accelerator, where they would wait for queued kernels.
"""

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_fsdp_recipes.errors import RecipeError, describe

T = TypeVar("T")

# How long a rank waits for another rank that downloads a model or writes to slow storage.
# The wait ends if a rank dies.
PATIENCE = timedelta(days=1)
EXIT_SECONDS = 3.0  # the launcher ends the other ranks within this time after one rank has exited


def is_distributed() -> bool:
    """Return whether the process group has been initialized."""
    return dist.is_initialized()


def rank() -> int:
    """Return the global rank, or the launcher's value until the process group is initialized."""
    if is_distributed():
        return dist.get_rank()
    return int(os.getenv("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks. `rank` says where it comes from."""
    if is_distributed():
        return dist.get_world_size()
    return int(os.getenv("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def host_group(thread: str = "main") -> dist.ProcessGroup:
    """Return the gloo group of all ranks that one thread uses. Its timeout is `PATIENCE`.

    The first call for a thread is collective.
    """
    return _host_group_of(dist.group.WORLD, thread)


@functools.lru_cache(maxsize=2)
def _host_group_of(default: dist.ProcessGroup | None, thread: str) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=PATIENCE)


# The threads of a group free tensors, for which they need the interpreter's lock. While the
# interpreter shuts down, they would abort the process instead, so the groups are freed before.
atexit.register(_host_group_of.cache_clear)


def open_default_group(device: torch.device) -> None:
    """Let all ranks take part in the default group's first operation. Collective.

    NCCL creates the group's communicator in it. Only after that may some of the ranks send each
    other tensors of the device. A single rank sends nothing, and needs no communicator.
    """
    if world_size() > 1:
        dist.broadcast(torch.zeros(1, device=device), 0)


def set_timeout(timeout: timedelta | None) -> None:
    """Set the timeout of the default group, which load_model may have started with another one."""
    if dist.group.WORLD and timeout:
        dist.group.WORLD.set_timeout(timeout)


def can_send(device_type: str) -> bool:
    """Return whether ranks can send each other tensors. gloo aborts if they are not on the CPU."""
    return device_type == "cpu" or dist.get_backend() != "gloo"


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in the order of the ranks. Collective.

    Args:
        value: anything that can be pickled.
        group: a gloo group of all ranks. The default, `host_group()`, may be used only by the main
            thread.
    """
    if not is_distributed():
        return [value]
    values = [value] * world_size()
    dist.all_gather_object(values, value, group=group or host_group())
    return values


def from_main(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on every rank. Collective. `group` is as in `gather`."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group or host_group())
    return box[0]


@contextlib.contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If the body fails on any rank, raise the first failed rank's error on every rank. Collective.

    The body must not call collectives. `group` is as in `gather`.

    Raises:
        RecipeError: the failed rank's error. For another class of error, the message names that
            class and the rank (unless 0).
    """
    if not is_distributed():
        yield
        return
    own = None
    report = None
    try:
        yield
    except Exception as error:
        own = error
        kind = type(error) if isinstance(error, RecipeError) else RecipeError
        message = describe(error)
        if kind is RecipeError and not is_main():
            message = f"rank {rank()}: {message}"
        report = (kind, message)
    for kind, message in filter(None, gather(report, group)):
        raise kind(message) from own


def run_on_main(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `work()` on rank 0. Return its result, or raise its error, on every rank. Collective."""
    result: Any = None  # rank 0 sets it
    with agreed(group):
        if is_main():
            result = work()
    return from_main(result, group)


def print_main(message: str) -> None:
    """Print one line on rank 0."""
    if is_main():
        print(message, flush=True)


@contextlib.contextmanager
def exit_with_message() -> Iterator[None]:
    """On a RecipeError, print the error as one line on stderr and exit with status 1.

    Usually only one rank prints.
    """
    try:
        yield
    except RecipeError as error:
        if not is_main():
            # Usually rank 0 prints the same error, exits, and so ends this rank.
            time.sleep(EXIT_SECONDS)
        # A single write, so that the lines of several ranks do not interleave.
        os.write(sys.stderr.fileno(), f"{type(error).__name__}: {error}\n".encode())
        sys.exit(1)
