"""The output directory of a run. A checkpoint appears in it, and leaves it, by one rename.

    checkpoint-4/
        a complete checkpoint; its `manifest.json` lists all files with sizes and hashes
    _saving/
        checkpoints that are being written or deleted, and the lock of the run that trains
    _set-aside-<time>-checkpoint-6/
        a checkpoint renamed when a run resumed at an earlier step; never deleted

So no kill leaves a partial `checkpoint-<step>`. The last two names begin with `_`, so that Trainer
does not upload these directories to the Hub.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any, TextIO

import xxhash
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from hf_fsdp_recipes.errors import CheckpointError, explained

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE_KEY = "ShardedCheckpoints"  # key of the run's id in `TrainerState.stateful_callbacks`
WORKSPACE = "_saving"
LOCK = "lock"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return all directories named `checkpoint-<step>`, complete or not. The latest comes first."""
    checkpoints = [
        path
        for path in output_dir.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir() and not _is_exposed(path)
    ]
    # `checkpoint-04` is an older one of the same step. See `begin`.
    return sorted(checkpoints, key=lambda path: (step_of(path), path.name), reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step from a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def read_run_id(checkpoint: Path) -> str | None:
    """Return the id of the run that has saved a checkpoint, or None if only Trainer has."""
    with suppress(Exception):  # a damaged file can raise any error
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        states: Any = state.stateful_callbacks  # annotated as a list, but a dict
        return states[STATE_KEY]["run"]
    return None


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's manifest, or None if it is missing, unreadable or damaged."""
    file = checkpoint / MANIFEST
    try:
        if not file.is_file():  # a pipe would never end
            return None
        manifest = json.loads(file.read_text())
        written_hash = manifest.pop("xxh3", None)
        # A manifest from version 0.x has no hash and is accepted.
        if written_hash not in (None, _hash(manifest)):
            return None
        manifest["files"] = {
            name: {"bytes": int(facts["bytes"]), "xxh3": str(facts["xxh3"])}
            for name, facts in manifest["files"].items()
        }
        return manifest
    except Exception:  # a damaged one can raise any error
        return None


def write_manifest(
    checkpoint: Path,
    facts: Mapping[str, object],
    files: Mapping[str, dict],
) -> None:
    """Write a checkpoint's manifest and flush it to disk.

    `files` maps each file's path in the checkpoint to its size and hash. `facts` are the other
    entries.
    """
    manifest = {**facts, "files": dict(sorted(files.items()))}
    manifest["xxh3"] = _hash(manifest)
    file = checkpoint / MANIFEST
    file.write_text(json.dumps(manifest, indent=1))
    sync(file)


class OutputDirectory:
    """The output directory of one run. Only rank 0 calls its methods.

    Args:
        path: Trainer's output directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # training may change the working directory
        self.workspace = self.path / WORKSPACE
        self._lock: TextIO | None = None

    def open(self, run: str, resumed: str | None, step: int) -> None:
        """Lock the directory, and make it ready for a run that continues at a step.

        Deletes what a killed run left unfinished, and sets checkpoints of later steps aside.

        Args:
            run: the run's id.
            resumed: the checkpoint from which the run continues, if any.
            step: the step at which it continues.

        Raises:
            CheckpointError: another run trains here, or it has left checkpoints here. Nothing was
                changed.
        """
        with explained(CheckpointError, f"{self.path} cannot be written"):
            self._lock = lock(self.workspace / LOCK)
        if self._lock is None:
            raise CheckpointError(f"another run trains in {self.path}. End it first.")
        others = [path for path in self._list_saved() if read_run_id(path) != run]
        if resumed is not None and Path(resumed).absolute().parent.samefile(self.path):
            others = []
        if others:
            raise CheckpointError(
                f"{self.path} holds {others[0].name} of an earlier run. Resume it with "
                "--resume_from_checkpoint auto, in a script with "
                "resume_from_checkpoint=latest_checkpoint(output_dir), or choose another "
                "output_dir."
            )
        self._clean()
        if resumed and not Path(resumed).exists():
            raise CheckpointError(f"{resumed} was unfinished, and is deleted. Start again.")
        for path in list_checkpoints(self.path):  # also what a killed run has left of one
            if step_of(path) > step:
                logger.warning(
                    "training continues at step %d, so %s is renamed to %s",
                    step,
                    path,
                    set_aside(path).name,
                )

    def heal(self) -> None:
        """Delete what a killed run left unfinished, if there is any and no other run trains."""
        if self.workspace.exists():
            with suppress(OSError):
                self._lock = lock(self.workspace / LOCK, is_needed=False)
                self.close()

    def close(self) -> None:
        """Delete the workspace and unlock the directory. In a fork, do nothing."""
        if self._lock and not self._lock.closed:
            self._clean()
            rmtree(self.workspace, ignore_errors=True)
            self._lock.close()

    def begin(self, step: int) -> Path:
        """Return the empty directory in which the checkpoint of a step is to be written.

        `checkpoint-<step>` leads to it until `hide` is called. So other callbacks can read its
        files, and add files.

        If this step is already saved, that checkpoint is renamed to `checkpoint-0<step>` until it
        is replaced. This is still a checkpoint's name, so a kill loses nothing.
        """
        final = self.path / f"checkpoint-{step}"
        written = self.workspace / final.name
        rmtree(written, ignore_errors=True)
        if (final / TRAINER_STATE_NAME).exists():
            if _replaced(final).exists():  # a kill has left both
                self._delete(_replaced(final))
            final.rename(_replaced(final))
        written.mkdir(parents=True)
        self._take_over(written)
        final.symlink_to(Path(WORKSPACE, written.name))
        return written

    def hide(self, written: Path) -> None:
        """Let `checkpoint-<step>` no longer lead to the unfinished checkpoint."""
        if _is_exposed(self.path / written.name):
            (self.path / written.name).unlink()

    def _take_over(self, written: Path) -> None:
        """Move files that other code has written to `checkpoint-<step>` itself."""
        final = self.path / written.name
        if final.is_dir():
            shutil.copytree(final, written, dirs_exist_ok=True)
            rmtree(final)

    def add_others_files(self, written: Path) -> None:
        """Add what other code has written to `checkpoint-<step>`, now or in an earlier save."""
        self._take_over(written)
        replaced = _replaced(self.path / written.name)
        for name in (read_manifest(replaced) or {"files": {}})["files"]:
            if not (written / name).exists():
                (written / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(replaced / name, written / name)

    def publish(
        self,
        written: Path,
        facts: Mapping[str, object],
        files: Mapping[str, dict],
    ) -> None:
        """Flush a fully written checkpoint to disk, and give it its final name.

        `facts` and `files` are as in `write_manifest`.
        """
        for name, file_facts in files.items():
            if (written / name).stat().st_size != file_facts["bytes"]:
                raise CheckpointError(
                    f"{written / name} differs from what was written. "
                    "Do all nodes share output_dir?"
                )
        write_manifest(written, facts, files)
        for path in written.glob("**/"):
            sync(path)
        final = self.path / written.name
        self._take_over(written)  # written meanwhile
        written.rename(final)
        sync(self.path)
        if _replaced(final).exists():
            self._delete(_replaced(final))

    def discard(self, written: Path) -> None:
        """Delete an unfinished checkpoint. The one that it was to replace gets its name back."""
        final = self.path / written.name
        self.hide(written)
        rmtree(written, ignore_errors=True)
        if _replaced(final).exists():
            _replaced(final).rename(final)

    def prune(self, keep: int | None, latest: int, best: str | None) -> None:
        """Delete the oldest checkpoints until `keep` are left, as Trainer does.

        Never deletes that of the `latest` step or the `best` one. If `keep` is None or not
        positive, deletes none. If a checkpoint cannot be deleted, warns.
        """
        if keep is None or keep <= 0:
            return
        found = self._list_saved()
        needed = {latest, best and step_of(Path(best))}
        oldest = [path for path in reversed(found) if step_of(path) not in needed]
        for checkpoint in oldest[: max(0, len(found) - keep)]:
            try:
                self._delete(checkpoint)
            except OSError as error:
                logger.warning("%s cannot be deleted: %s", checkpoint, error)

    def _list_saved(self) -> list[Path]:
        """Return the checkpoints, but no directory of that name to which only a callback wrote."""
        return [
            path for path in list_checkpoints(self.path) if (path / TRAINER_STATE_NAME).exists()
        ]

    def _delete(self, checkpoint: Path) -> None:
        """Delete a checkpoint, so that a kill meanwhile leaves no partial `checkpoint-<step>`."""
        doomed = self.workspace / f"delete-{checkpoint.name}"
        checkpoint.rename(doomed)
        rmtree(doomed, ignore_errors=True)

    def _clean(self) -> None:
        """Delete what is unfinished."""
        for path in self.path.glob("checkpoint-*"):
            self.hide(path)
        for path in self.workspace.glob("*"):
            if path.name != LOCK:
                rmtree(path, ignore_errors=True)


def set_aside(directory: Path) -> Path:
    """Rename a directory, so that nothing takes it for the newest. Return its new path."""
    aside = directory.with_name(f"_set-aside-{time.time_ns()}-{directory.name}")
    directory.rename(aside)
    return aside


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(file: Path, is_needed: bool = True) -> TextIO | None:
    """Lock a file and return it open, or None if it is locked already.

    The lock lasts until the file is closed or this process ends. On a file system without locks,
    return None unless the lock `is_needed`: then only warn.
    """
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its last owner has just deleted it
            stream = file.open("a")
            # Otherwise, a data loader's worker that outlives a killed run would keep the lock.
            os.register_at_fork(after_in_child=stream.close)
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.close()
                return None
            except OSError as error:
                if not is_needed:
                    stream.close()
                    return None
                logger.warning(
                    "%s cannot be locked: %s. Start only one run in this directory at a time.",
                    file.parent,
                    error,
                )
            if os.path.samestat(file.stat(), os.fstat(stream.fileno())):
                return stream


def _replaced(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name.replace("-", "-0"))


def _is_exposed(path: Path) -> bool:
    return path.is_symlink() and path.readlink().parent == Path(WORKSPACE)


def _hash(entries: Mapping[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(entries).encode())
