"""Keeps two runs from writing to the same output directory.

The lock of a node that has died may stay on a shared file system (NFSv3). So a run that holds a lock also writes to a second file
every few seconds; if it stops, the next run takes the lock over.
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
BEAT_FILE = ".writer.beat"  # filelock may empty or replace its own file
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0  # without a beat; less than a run waits for the lock
POLL_SECONDS = 0.5

_locks: dict[Path, "DirectoryLock"] = {}  # of this process


class DirectoryLock:
    """The lock of one output directory in this process. It may be acquired several times; release each, or exit."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = FileLock(directory / LOCK_FILE, thread_local=False)
        self._released = threading.Event()
        self._is_lost = False
        job = os.environ.get("SLURM_JOB_ID")
        owner = f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else "")
        self._owner = f"{owner}; {secrets.token_hex(8)}; "  # unique, unlike processes and hosts in containers
        self._num_beats = 0

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    @property
    def is_locked(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock.is_locked

    def acquire(self, wait_seconds: float) -> None:
        """Acquire the lock, if necessary from a run that has not written a beat for STALE_SECONDS.

        Raises:
            Timeout: another run still holds it after `wait_seconds`.
        """
        if self._lock.is_locked:
            self._lock.acquire()
            return
        deadline = time.monotonic() + wait_seconds
        beat, num_unchanged = self.read(), 0
        while True:
            with contextlib.suppress(Timeout):
                self._lock.acquire(timeout=min(POLL_SECONDS, wait_seconds), poll_interval=POLL_SECONDS / 5)
                break
            if time.monotonic() > deadline:
                raise Timeout(self._lock.lock_file)
            started = time.monotonic()
            found = self.read()
            # Only reads that return at once count: after a stall of the file server, the beat may be as late.
            is_unchanged = bool(found) and found == beat and time.monotonic() - started < 1
            beat, num_unchanged = found, num_unchanged + 1 if is_unchanged else 0
            if num_unchanged * POLL_SECONDS > STALE_SECONDS:
                (self._directory / LOCK_FILE).unlink(missing_ok=True)
                num_unchanged = 0
        self._released, self._is_lost = threading.Event(), False
        self._write_beat("w")
        threading.Thread(target=self._keep_beating, args=(self._released,), daemon=True).start()

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
        self._is_lost |= self._lock.is_locked and bool(found) and not found.startswith(self._owner)
        if self._is_lost:
            raise RecipeError(
                f"{self._directory} was taken over by {self.read_owner()}, because this process stood still for "
                f"{STALE_SECONDS:.0f} s. This run ends; let the other one continue."
            )

    def read(self) -> str:
        """Return the last beat of the run that holds the lock."""
        try:
            return (self._directory / BEAT_FILE).read_text()
        except (OSError, ValueError):
            return ""

    def read_owner(self) -> str:
        """Return which process holds the lock."""
        return self.read().partition(";")[0] or "unknown process"

    def _write_beat(self, mode: str) -> None:
        self._num_beats += 1
        with (self._directory / BEAT_FILE).open(mode) as file:
            file.write(f"{self._owner}{self._num_beats:010}")

    def _keep_beating(self, released: threading.Event) -> None:
        while not released.wait(BEAT_SECONDS):
            try:
                self.check()
                self._write_beat("r+")  # in place, so that a full disk does not matter
            except RecipeError:
                return
            except OSError:
                continue


def lock_directory(output_dir: str | os.PathLike[str], wait_seconds: float = 60.0) -> DirectoryLock:
    """Lock a run's output directory for this process, and check that it can be written. Rank 0 only.

    Waits for a previous run to exit. A process may lock a directory several times; release each lock, or exit. Has no effect
    on file systems without locks.

    Raises:
        CheckpointError: another process still holds the lock after `wait_seconds`, or the directory cannot be written.
    """
    directory = Path(output_dir)
    lock = _locks.setdefault(directory.absolute(), DirectoryLock(directory))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(wait_seconds)
    except Timeout as error:
        raise CheckpointError(
            f"{output_dir} is in use by another run ({lock.read_owner()}). Stop that run, or choose another output_dir."
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
