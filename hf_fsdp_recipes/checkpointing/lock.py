"""Keeps two runs from writing to the same output directory."""

import errno
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from hf_fsdp_recipes.errors import CheckpointError

LOCK_FILE = ".writer.lock"

_locks: dict[Path, FileLock] = {}  # of this process; each counts how often it was acquired


def lock_directory(output_dir: str | os.PathLike[str], wait_seconds: float = 60.0) -> FileLock:
    """Lock a run's output directory for this process, and check that it can be written. Rank 0 only.

    Waits for a previous run to exit. A process may lock a directory several times; release each lock, or exit. Has no effect
    on file systems without locks.

    Raises:
        CheckpointError: another process still holds the lock after `wait_seconds`, or the directory cannot be written.
    """
    directory = Path(output_dir)
    lock = _locks.setdefault(directory.absolute(), FileLock(directory / LOCK_FILE))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_seconds, poll_interval=0.5)
        (directory / LOCK_FILE).write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout as error:
        raise CheckpointError(
            f"{output_dir} is in use by another run ({_read_owner(directory)}). Stop that run, or choose another output_dir."
        ) from error
    except NotImplementedError:
        pass  # the file system has no locks
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            return lock  # likewise
        lock.release()
        raise CheckpointError(_describe(directory, error)) from error
    return lock


def _describe(directory: Path, error: OSError) -> str:
    """Return why a directory cannot be written."""
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


def _read_owner(directory: Path) -> str:
    try:
        return (directory / LOCK_FILE).read_text() or "unknown process"
    except OSError:
        return "unknown process"
