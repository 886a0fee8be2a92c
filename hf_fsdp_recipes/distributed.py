"""Provides rank, world size, small collectives, and errors that every rank raises together.

Thin functions over `torch.distributed` that also work in a single process, without a process group.
"""

import contextlib
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_fsdp_recipes.errors import RecipeError, UnexpectedError

Value = TypeVar("Value")
logger = logging.getLogger(__name__)

EXIT_WAIT_SECONDS = 3.0  # the launcher ends the other ranks within this time after one has exited
UNLIMITED = timedelta(days=30)  # timeout for work on one rank that may take arbitrarily long


def is_distributed() -> bool:
    """Return whether the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the global rank, from the process group or, before it is initialized, from the launcher."""
    return dist.get_rank() if is_distributed() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks, from the process group or, before it is initialized, from the launcher."""
    return dist.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return whether this is global rank 0."""
    return rank() == 0


@contextlib.contextmanager
def ignore_launcher() -> Iterator[None]:
    """Without a process group, count this process as the only one, whatever the launcher's variables say.

    Kubernetes sets these variables for every command in a pod.
    """
    names = () if is_distributed() else ("RANK", "WORLD_SIZE")
    removed = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)


def node_id() -> str:
    """Return a string that is the same on all ranks of a node and differs between nodes."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")  # Linux only
    return f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.is_file() else ''}"


# For each use ("short" or "patient <thread>"): (default group when the gloo group was created, gloo group).
_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def host_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks, or None if the default group is already one or does not exist.

    Use it to send Python objects: an accelerator's group (such as NCCL) would copy them to the accelerator, and the copy
    would wait for all work that is queued there.

    Collective on the first call: every rank must call this.
    """
    default = dist.group.WORLD
    if default is None or dist.get_backend(default) == "gloo":
        return None
    return _group("short", _default_timeout(default))


def patient_group(thread: str = "main") -> dist.ProcessGroup | None:
    """Return a gloo group without a timeout, for waiting while one rank works for longer than `ddp_timeout`.

    One rank may be writing a checkpoint or downloading a model, for example. If that rank dies, the wait ends.

    Collective on the first call: every rank must call this.

    Args:
        thread: name for the calling thread, the same on every rank. Each thread that communicates needs a separate group.
    """
    return _group(f"patient {thread}", UNLIMITED) if is_distributed() else None


def _group(use: str, timeout: timedelta | None) -> dist.ProcessGroup:
    default = dist.group.WORLD
    assert default is not None
    if use not in _groups or _groups[use][0] is not default:
        _groups[use] = default, dist.new_group(backend="gloo", timeout=timeout)
    return _groups[use][1]


def _default_timeout(group: dist.ProcessGroup) -> timedelta | None:
    backend = group._get_backend(torch.device(dist.distributed_c10d._get_object_coll_device(group)))
    return getattr(getattr(backend, "options", None), "_timeout", None)  # only torch's own backends have options


def set_timeout(seconds: float) -> None:
    """Set the timeout of collectives, even if the process group was started with another timeout.

    Collective on the first call, like `host_group`.
    """
    timeout = timedelta(seconds=seconds)
    groups = [dist.group.WORLD, host_group()] if is_distributed() else []
    for group in groups:
        if group is not None and _default_timeout(group) not in (None, timeout):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def barrier() -> None:
    """Wait for all ranks, but not for their accelerators. Collective: every rank must call this."""
    if is_distributed():
        dist.barrier(host_group())


def broadcast_object(value: Value, group: dist.ProcessGroup | None = None, source: int = 0) -> Value:
    """Return rank 0's `value`, or that of rank `source`, on every rank.

    Collective: every rank of the group (default: all) must call this.
    """
    if not is_distributed():
        return value
    objects = [value]
    dist.broadcast_object_list(objects, src=source, group=group or host_group())
    return objects[0]


def gather_on_main(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks on rank 0, in rank order, and an empty list on other ranks.

    Each rank sends to rank 0 only, whereas torch's `gather_object` sends the sizes around a ring of all ranks.

    Collective: every rank must call this. Ranks other than 0 do not wait for each other.
    """
    if not is_distributed():
        return [value]
    group = group or host_group()
    if not is_main():
        dist.send_object_list([value], dst=0, group=group)
        return []
    values = [value]
    for sender in range(1, world_size()):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=sender, group=group)
        values += received
    return values


def gather_objects(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks, in rank order. If only rank 0 needs them, `gather_on_main` sends less.

    Collective: every rank must call this.
    """
    return broadcast_object(gather_on_main(value, group), group)


def scatter_from_main(values: list[Value], group: dist.ProcessGroup | None = None) -> Value:
    """Return element r of rank 0's list on rank r. Collective: every rank must call this."""
    if not is_distributed():
        return values[0]
    own: list[Any] = [None]
    dist.scatter_object_list(own, values if is_main() else None, src=0, group=group or host_group())
    return own[0]


def first_rank(flag: bool, group: dist.ProcessGroup | None = None) -> int | None:
    """Return the lowest rank that passes True, or None.

    Each rank sends one byte. Collective: every rank must call this.
    """
    if not is_distributed():
        return 0 if flag else None
    group = group or host_group()
    own, first = torch.tensor([flag]), torch.tensor([-1])
    flags = [torch.empty_like(own) for _ in range(world_size())] if is_main() else None
    dist.gather(own, flags, dst=0, group=group)
    if flags is not None and any(flags):
        first[0] = torch.cat(flags).tolist().index(True)
    dist.broadcast(first, src=0, group=group)
    return None if first.item() < 0 else int(first.item())


def gather_integers(values: torch.Tensor) -> list[list[int]]:
    """Return the values of all ranks, in rank order, with one collective and one device synchronization.

    Collective: every rank must call this.

    Args:
        values: (N,) int64, on the device of the process group.
    """
    if not is_distributed():
        return [values.tolist()]
    gathered = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(gathered, values)
    rows: list[list[int]] = torch.stack(gathered).tolist()
    return rows


def warn_main(message: str) -> None:
    """Log a warning on rank 0."""
    if is_main():
        logger.warning(message)


def print_main(message: str) -> None:
    """Print one line on rank 0."""
    if is_main():
        print(message, flush=True)


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """If any rank has failed, raise the lowest failed rank's error on every rank.

    Collective: every rank of the group (default: all) must call this, with its own error or None.

    Raises:
        RecipeError: the lowest failed rank's error, with the same class and message on every rank. An OSError with a file
            name becomes a RecipeError, any other exception an UnexpectedError that names its class and rank. On each failed
            rank, the rank's original exception is the cause.
    """
    failed = first_rank(error is not None, group)
    if failed is not None:
        _raise_report(failed, broadcast_object(_report(error), group, failed), error)


def _report(error: Exception | None) -> Any:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return (
            RecipeError,
            f"{error.filename}: {error.strerror}. Check the path, its permissions and free space.",
            True,
        )
    return None if error is None else (type(error), str(error), isinstance(error, RecipeError))


def _raise_report(failed_rank: int, report: Any, own_error: Exception | None) -> None:
    kind, message, is_ours = report
    agreed = kind(message) if is_ours else UnexpectedError(f"rank {failed_rank}: {kind.__name__}: {message}")
    agreed.is_agreed = True
    raise agreed from own_error


def run_on_main(work: Callable[[], Value], group: dist.ProcessGroup | None = None, source: int = 0) -> Value:
    """Return on every rank what `work` returns on rank 0, or on rank `source`.

    Collective: every rank of the group (default: all) must call this. `work` must not call collectives.
    """
    value, error = None, None
    if rank() == source or not is_distributed():
        try:
            value = work()
        except Exception as caught:
            error = caught
    report, value = broadcast_object((_report(error), value), group, source)
    if report is not None:
        _raise_report(source, report, error)
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def sync_errors(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If a block fails on any rank, raise its error on all ranks.

    Collective: every rank of the group (default: all) must enter this. The block must not call collectives.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(error, group)


def main_first(work: Callable[[], Value]) -> Value:
    """Run `work` first on rank 0, then on one rank of each other node, then on all other ranks. Return this rank's result.

    This way rank 0 fills a shared cache, and each node's first rank fills a node-local cache.

    Collective: every rank must call this. `work` must not call collectives; it may take longer than `ddp_timeout`,
    because ranks wait in a group without a timeout.
    """
    if not is_distributed():
        return work()
    own_turn = 0 if is_main() else 1 if os.environ.get("LOCAL_RANK", "0") == "0" else 2
    result: Any = None
    for turn in range(3):
        with sync_errors(patient_group()):
            result = work() if turn == own_turn else result
    return result


@contextlib.contextmanager
def exit_with_message() -> Iterator[None]:
    """Turn a RecipeError into one line on stderr, from one rank, and exit status 1; only unexpected errors get a traceback."""
    try:
        yield
    except RecipeError as error:
        if isinstance(error, UnexpectedError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        if not error.is_agreed and not is_main():
            # If rank 0 has the same error, only rank 0 prints: the launcher ends this rank during this wait.
            time.sleep(EXIT_WAIT_SECONDS * (1 if os.environ.get("LOCAL_RANK", "0") == "0" else 2))
        if not error.is_agreed or is_main():
            # A single write, so that the lines of several ranks do not interleave.
            os.write(sys.stderr.fileno(), f"{type(error).__name__}: {error}\n".encode())
        if error.is_agreed:
            barrier()  # the launcher ends the other ranks as soon as one exits; let rank 0 print first
        sys.exit(1)
