"""Keeps two runs from writing to the same output directory.

The lock is a file. The run that holds it updates the file's modification time every few seconds. Another run takes the lock
over if the holder has exited, or has not updated the file for STALE_SECONDS, for example because the node has died.
"""

import errno
import os
from pathlib import Path

from filelock import SoftFileLease, Timeout

from hf_fsdp_recipes.errors import CheckpointError, RecipeError

LOCK_FILE = ".writer.lease"
STALE_SECONDS = 30.0  # shorter than `wait_seconds`, so that a waiting run can take over a dead holder's lock

_locks: dict[Path, SoftFileLease] = {}  # this process's locks


def lock_directory(output_dir: str | os.PathLike[str], wait_seconds: float = 60.0) -> SoftFileLease:
    """Lock a run's output directory for this process, and check that the directory is writable. Rank 0 only.

    Waits up to `wait_seconds` for a previous run to exit. A process may lock a directory several times, and
    must then release the lock as often. The exit of the process also releases the lock.

    Raises:
        CheckpointError: another process still holds the lock after `wait_seconds`, or the directory cannot be written.
    """
    directory = Path(output_dir)
    new = SoftFileLease(directory / LOCK_FILE, lease_duration=STALE_SECONDS, thread_local=False)
    lock = _locks.setdefault(directory.absolute(), new)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_seconds, poll_interval=0.5)
    except Timeout as error:
        raise CheckpointError(
            f"{output_dir} is in use by another run ({_describe_owner(lock)}). Stop that run, or choose another output_dir."
        ) from error
    except OSError as error:
        raise CheckpointError(_describe(directory, error)) from error
    return lock


def check_lock(output_dir: str | os.PathLike[str]) -> None:
    """Raise a RecipeError if this process has lost its lock of a directory, for example to another run. Not a collective."""
    lock = _locks.get(Path(output_dir).absolute())
    if lock is None or not lock.is_locked:
        return
    owner = lock.owner
    if owner is not None and owner.token != lock.token:
        raise RecipeError(
            f"{output_dir} was taken over by {_describe_owner(lock)}, because this process stalled for {STALE_SECONDS:.0f} s. "
            f"This run ends; let the other one continue."
        )
    if lock.compromise is not None:  # the file was deleted, or could not be updated
        raise RecipeError(
            f"the lock of {output_dir} was lost ({lock.compromise.reason}), so another run could start in it. This run ends; "
            f"start the same command again."
        )


def _describe_owner(lock: SoftFileLease) -> str:
    owner = lock.owner
    return "unknown process" if owner is None else f"process {owner.pid} on {owner.hostname.partition('?')[0]}"


def _describe(directory: Path, error: OSError) -> str:
    """Return a message that says why a directory cannot be written."""
    if error.errno == errno.ENAMETOOLONG:
        return f"the name of output_dir {directory} is too long. Choose a shorter one."
    for path in (directory, *directory.parents):
        if path.is_symlink() and not path.exists():
            return (
                f"output_dir is {directory}, but {path} is a symbolic link to {path.readlink()}, which does not exist. "
                f"Create it, or choose another output_dir."
            )
        if path.is_file():
            return f"output_dir is {directory}, but {path} is a file. Choose another output_dir."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"output_dir {directory} has no space left. Free some, or choose another output_dir."
    return f"output_dir {directory} cannot be written: {error.strerror}. Change its permissions, or choose another one."
