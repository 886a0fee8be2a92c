"""The directories of a run. No kill leaves a partial `checkpoint-<step>`.

A checkpoint gets its name, or loses it before it is deleted, by one rename.

    checkpoint-4/
        a complete checkpoint; its `manifest.json` lists all files with sizes and hashes
    _saving-<run id>/
        checkpoints that are being written or deleted; locked while the run's rank 0 lives
    _set-aside-<time>-checkpoint-6/
        a checkpoint renamed when a run resumed at an earlier step; never deleted

The last two directories begin with `_`, so that Trainer does not upload them to the Hub.
"""

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any, TextIO, TypedDict

import xxhash

from hf_fsdp_recipes.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class FileFacts(TypedDict):
    """What a manifest says of a file: its size and its hash."""

    bytes: int
    xxh3: str


Files = dict[str, FileFacts]  # {path in the checkpoint: facts}


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return all directories named `checkpoint-<step>`, complete or not. The latest comes first."""
    checkpoints = [
        path
        for path in output_dir.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()
    ]
    return sorted(checkpoints, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step from a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's manifest, or None if it is missing, unreadable or damaged."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        written_hash = manifest.pop("xxh3", None)
        # A manifest from version 0.x has no hash and is accepted.
        if written_hash not in (None, _hash(manifest)):
            return None
        manifest["files"] = {
            name: {"bytes": int(facts["bytes"]), "xxh3": str(facts["xxh3"])}
            for name, facts in manifest["files"].items()
        }
        return manifest
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


class RunDirectory:
    """The output directory of one run. Only rank 0 calls its methods.

    Args:
        output_dir: Trainer's output directory.
        run: the run's id.
    """

    def __init__(self, output_dir: Path, run: str) -> None:
        self.output_dir = output_dir
        self.run = run
        self.workspace = output_dir / f"_saving-{run}"
        self._lock: TextIO | None = None

    def open(self, resumed_step: int) -> None:
        """Lock the directory for this run.

        Deletes what killed processes left unfinished, and sets checkpoints of later steps aside.

        Raises:
            CheckpointError: a run that starts at step 0 finds checkpoints of another run, or the
                same run is still running.
        """
        others = [path for path in list_checkpoints(self.output_dir) if not self._is_own(path)]
        if others and not resumed_step:
            raise CheckpointError(
                f"{self.output_dir} holds {others[0].name} of an earlier run. Resume it with "
                "--resume_from_checkpoint auto, in a script with "
                "resume_from_checkpoint=latest_checkpoint(output_dir), or choose another "
                "output_dir."
            )
        for leftover in self.output_dir.glob("_saving-*"):
            is_own = leftover == self.workspace
            if resumed_step and not is_own:
                continue
            lock = _lock(leftover)
            if lock is not None:
                rmtree(leftover, ignore_errors=True)
                lock.close()
            elif is_own:
                raise CheckpointError(
                    f"another process still runs this run in {self.output_dir}. End it first."
                )
        self.workspace.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.workspace)
        for checkpoint in list_checkpoints(self.output_dir):
            if step_of(checkpoint) > resumed_step:
                # Otherwise, the next resume would take it as the latest checkpoint.
                aside = self.output_dir / f"_set-aside-{time.time_ns()}-{checkpoint.name}"
                checkpoint.rename(aside)
                logger.warning(
                    "training continues at step %d, so %s is renamed to %s",
                    resumed_step,
                    checkpoint,
                    aside.name,
                )

    def close(self) -> None:
        """Delete the workspace and unlock the directory."""
        rmtree(self.workspace, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def publish(
        self,
        written: Path,
        final: Path,
        facts: Mapping[str, object],
        files: Files,
    ) -> None:
        """Add the manifest to a fully written checkpoint, and give it its final name.

        Before that, the checkpoint is flushed to disk. `facts` are the manifest's entries besides
        `files`.
        """
        for name, file_facts in files.items():
            if (written / name).stat().st_size != file_facts["bytes"]:
                raise CheckpointError(
                    f"{written / name} differs from what was written. "
                    "Do all nodes share output_dir?"
                )
        manifest = {"run": self.run, **facts, "files": dict(sorted(files.items()))}
        manifest["xxh3"] = _hash(manifest)
        (written / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [written / MANIFEST, *written.glob("**/")]:  # all directories, too
            sync(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        while final.exists() and not self._is_own(final):
            # Another callback has written files to this directory in on_save.
            for path in final.iterdir():
                path.rename(written / path.name)
            with suppress(OSError):  # rmdir fails if another file has just been written
                final.rmdir()
        # This is still a checkpoint's name, so a kill loses nothing.
        replaced = final.with_name(final.name.replace("-", "-0"))
        if self._is_own(final):
            # This step is already saved. Trainer may save it again when the epoch ends.
            final.rename(replaced)
        written.rename(final)
        sync(final.parent)
        if replaced.exists():
            self._delete(replaced)

    def prune(self, directory: Path, keep: int | None, best: str | None) -> None:
        """Delete this run's oldest checkpoints until `keep` are left.

        Never deletes the latest or the best one. If `keep` is None, deletes none.
        """
        if not keep:
            return
        own = [path for path in list_checkpoints(directory) if self._is_own(path)]
        oldest = [path for path in reversed(own[1:]) if str(path) != best]
        for checkpoint in oldest[: max(0, len(own) - keep)]:
            self._delete(checkpoint)

    def _delete(self, checkpoint: Path) -> None:
        """Delete a checkpoint, so that a kill meanwhile leaves no partial `checkpoint-<step>`."""
        doomed = self.workspace / f"delete-{checkpoint.name}"
        checkpoint.rename(doomed)
        rmtree(doomed, ignore_errors=True)

    def _is_own(self, checkpoint: Path) -> bool:
        return (read_manifest(checkpoint) or {}).get("run") == self.run


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(entries: Mapping[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(entries).encode())


def _lock(directory: Path) -> TextIO | None:
    """Lock a workspace and return its open lock file, or None if another process holds the lock.

    The lock lasts until the file is closed or this process ends. A file system without locks causes
    only a warning.
    """
    stream = (directory / "lock").open("a")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    except OSError as error:
        logger.warning(
            "%s cannot be locked: %s. Start only one run in this directory at a time.",
            directory,
            error,
        )
    return stream
