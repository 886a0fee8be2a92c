"""Keeps two runs from writing checkpoints to the same directory."""

import errno
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from hf_fsdp_recipes.errors import CheckpointError

LOCK_FILE = ".writer.lock"


def lock_directory(output_dir: str | os.PathLike[str], wait_seconds: float = 60.0) -> FileLock:
    """Lock a run's output directory for this process; release the returned lock when the run ends. Rank 0 only.

    Waits for a previous run to exit. Has no effect on file systems without locks.

    Raises:
        CheckpointError: another process still holds the lock after `wait_seconds`, or the directory is not writable.
    """
    directory = Path(output_dir)
    lock = FileLock(directory / LOCK_FILE)
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
        raise CheckpointError(f"{directory} is not writable: {error.strerror}. Check its permissions.") from error
    return lock


def _read_owner(directory: Path) -> str:
    try:
        return (directory / LOCK_FILE).read_text() or "unknown process"
    except OSError:
        return "unknown process"
