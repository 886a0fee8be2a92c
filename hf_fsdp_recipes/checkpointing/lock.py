"""Keeps two runs from writing to the same output directory.

The lock of a node that has died may stay on a shared file system (NFSv3). So whoever holds a lock also rewrites its file every
few seconds; if nobody does, the next run takes it over.
"""

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from filelock import FileLock, Timeout

from hf_fsdp_recipes.errors import CheckpointError, RecipeError

LOCK_FILE = ".writer.lock"
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0  # without a beat; less than a run waits for the lock

_locks: dict[Path, "DirectoryLock"] = {}  # of this process


class DirectoryLock:
    """The lock of one output directory in this process. It may be acquired several times; release each, or exit."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = FileLock(file)
        self._released = threading.Event()
        job = os.environ.get("SLURM_JOB_ID")
        self._owner = f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else "")

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    @property
    def is_locked(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock.is_locked

    def acquire(self, wait_seconds: float) -> None:
        """Acquire the lock, if necessary from a process that has not beaten for STALE_SECONDS.

        Raises:
            Timeout: another process still holds it after `wait_seconds`.
        """
        deadline = time.monotonic() + wait_seconds
        beat, changed = self.read(), time.monotonic()
        while not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=min(0.5, wait_seconds), poll_interval=0.1)
            except Timeout:
                if time.monotonic() > deadline:
                    raise
                found = self.read()
                if found and found != beat:  # an old filelock empties the file
                    beat, changed = found, time.monotonic()
                elif time.monotonic() - changed > STALE_SECONDS:
                    self._file.unlink(missing_ok=True)
            else:
                self._released = threading.Event()
                self._write_beat("w")
                threading.Thread(target=self._keep_beating, args=(self._released,), daemon=True).start()
                return
        self._lock.acquire()

    def release(self) -> None:
        """Release the lock once; the last release lets another run have it."""
        if self._lock.lock_counter <= 1:
            self._released.set()
        self._lock.release()

    def check(self) -> None:
        """Check that no other run has taken over the lock. Not a collective.

        Raises:
            RecipeError: it has.
        """
        found = self.read()
        if self._lock.is_locked and found and not found.startswith(self._owner):
            raise RecipeError(
                f"{self._file.parent} was taken over by {found.partition(';')[0]}, because this process stood still for "
                f"{STALE_SECONDS:.0f} s. This run ends; let the other one continue."
            )

    def read(self) -> str:
        """Return who holds the lock, and its last beat."""
        try:
            return self._file.read_text()
        except OSError:
            return ""

    def _write_beat(self, mode: str) -> None:
        with self._file.open(mode) as file:
            file.write(f"{self._owner}; {secrets.token_hex(4)}")

    def _keep_beating(self, released: threading.Event) -> None:
        while not released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError, RecipeError):
                self.check()
                self._write_beat("r+")  # in place, so that a full disk does not matter


def lock_directory(output_dir: str | os.PathLike[str], wait_seconds: float = 60.0) -> DirectoryLock:
    """Lock a run's output directory for this process, and check that it can be written. Rank 0 only.

    Waits for a previous run to exit. A process may lock a directory several times; release each lock, or exit. Has no effect
    on file systems without locks.

    Raises:
        CheckpointError: another process still holds the lock after `wait_seconds`, or the directory cannot be written.
    """
    directory = Path(output_dir)
    lock = _locks.setdefault(directory.absolute(), DirectoryLock(directory / LOCK_FILE))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(wait_seconds)
    except Timeout as error:
        owner = lock.read().partition(";")[0] or "unknown process"
        raise CheckpointError(
            f"{output_dir} is in use by another run ({owner}). Stop that run, or choose another output_dir."
        ) from error
    except NotImplementedError:
        pass  # the file system has no locks
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            return lock  # likewise
        lock.release()
        raise CheckpointError(_describe(directory, error)) from error
    return lock


def check_lock(output_dir: str | os.PathLike[str]) -> None:
    """Check that no other run has taken over this process's lock of a directory, if it has one. Not a collective.

    Raises:
        RecipeError: it has.
    """
    lock = _locks.get(Path(output_dir).absolute())
    if lock is not None:
        lock.check()


def _describe(directory: Path, error: OSError) -> str:
    """Return why a directory cannot be written."""
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
