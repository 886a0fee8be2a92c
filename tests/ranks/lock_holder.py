"""Another process that holds the lock of an output directory."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ranks.harness import start_ranks


@contextlib.contextmanager
def locked_by_another(output: Path, scratch: Path) -> Iterator[None]:
    """Hold the lock of `output` in another process inside `with`; `scratch` is an existing directory for its messages."""
    is_held, is_released = scratch / "held", scratch / "released"
    processes, _ = start_ranks(_hold, 1, output, is_held, is_released)
    while not is_held.exists():
        time.sleep(0.1)
    try:
        yield
    finally:
        is_released.touch()
        processes[0].join(20)


def _hold(output: Path, is_held: Path, is_released: Path) -> None:
    from hf_fsdp_recipes.checkpointing.lock import lock_directory

    lock_directory(output)
    is_held.touch()
    while not is_released.exists():
        time.sleep(0.1)


def wait_briefly() -> None:
    """Limit this process's wait for a lock to two seconds."""
    from filelock import SoftFileLease

    acquire = SoftFileLease.acquire
    SoftFileLease.acquire = lambda self, timeout, **rest: acquire(self, min(timeout, 2.0), **rest)
