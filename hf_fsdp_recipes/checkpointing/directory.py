"""A checkpoint gets its name, or loses it before it is deleted, by one rename. So no kill leaves a partial `checkpoint-<step>`.

    checkpoint-4/           a complete checkpoint; its `manifest.json` lists all files with sizes and hashes
    _saving-<run id>/       checkpoints that are being written or deleted; locked while the run's rank 0 lives
    _set-aside-<time>-checkpoint-6/  a checkpoint renamed when a run resumed at an earlier step; never deleted

The last two names begin with `_`, so that Trainer does not upload these directories to the Hub.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from hf_fsdp_recipes.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return all directories named `checkpoint-<step>`, complete or not. The latest step comes first."""
    found = [
        path
        for path in output_dir.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", path.name)
    ]
    return sorted((path for path in found if path.is_dir()), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step from a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's manifest, or None if it is missing, unreadable or damaged."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        if manifest.pop("xxh3", None) not in (None, _hash(manifest)):
            return None  # damaged; a manifest from version 0.x has no hash and is accepted
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
        self.output_dir, self.run = output_dir, run
        self.workspace = output_dir / f"_saving-{run}"
        self._lock: Any = None

    def open(self, resumed_step: int) -> None:
        """Lock the directory for this run. Delete what killed processes left unfinished. Set checkpoints of later steps aside.

        Raises:
            CheckpointError: a run that starts at step 0 finds checkpoints of another run, or the same run is still running.
        """
        others = [path for path in list_checkpoints(self.output_dir) if not self._is_own(path)]
        if others and not resumed_step:
            raise CheckpointError(
                f"{self.output_dir} holds {others[0].name} of an earlier run. Resume it with --resume_from_checkpoint auto, in a "
                f"script with resume_from_checkpoint=latest_checkpoint(output_dir), or choose another output_dir."
            )
        for leftover in self.output_dir.glob("_saving-*"):
            if leftover == self.workspace or not resumed_step:
                lock = _lock(leftover)
                if lock is not None:
                    shutil.rmtree(leftover, ignore_errors=True)
                    lock.close()
                elif leftover == self.workspace:
                    raise CheckpointError(
                        f"another process still runs this run in {self.output_dir}. End it first."
                    )
        self.workspace.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.workspace)
        for path in list_checkpoints(self.output_dir):
            if (
                step_of(path) > resumed_step
            ):  # otherwise the next resume would take it as the latest checkpoint
                aside = self.output_dir / f"_set-aside-{time.time_ns()}-{path.name}"
                path.rename(aside)
                logger.warning(
                    "training continues at step %d, so %s is renamed to %s",
                    resumed_step,
                    path,
                    aside.name,
                )

    def close(self) -> None:
        """Delete the workspace and unlock the directory."""
        shutil.rmtree(self.workspace, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def publish(self, written: Path, final: Path, manifest: Mapping[str, Any]) -> None:
        """Add the manifest to a fully written checkpoint, flush the checkpoint to disk, and give it its final name."""
        for name, facts in manifest["files"].items():
            if (written / name).stat().st_size != facts["bytes"]:
                raise CheckpointError(
                    f"{written / name} differs from what was written. Do all nodes share output_dir?"
                )
        entries = {"run": self.run, **manifest}
        (written / MANIFEST).write_text(json.dumps({**entries, "xxh3": _hash(entries)}, indent=1))
        for path in [
            written / MANIFEST,
            written,
            *(path for path in written.rglob("*") if path.is_dir()),
        ]:
            sync(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        replaced = final.with_name(
            final.name.replace("-", "-0")
        )  # still a checkpoint's name, so a kill loses nothing
        while final.exists():
            if self._is_own(
                final
            ):  # this step is already saved; Trainer may save it again when the epoch ends
                final.rename(replaced)
                break
            for (
                path
            ) in final.iterdir():  # another callback has written files to this directory in on_save
                path.rename(written / path.name)
            with contextlib.suppress(OSError):  # rmdir fails if another file has just been written
                final.rmdir()
        written.rename(final)
        sync(final.parent)
        if replaced.exists():
            self._delete(replaced)

    def prune(self, directory: Path, keep: int | None, protected: set[str]) -> None:
        """Delete this run's oldest checkpoints until `keep` are left. Never delete the latest one or those in `protected`."""
        own = [path for path in list_checkpoints(directory) if self._is_own(path)]
        num_extra = len(own) - keep if keep else 0
        for path in [path for path in own[:0:-1] if str(path) not in protected][
            : max(0, num_extra)
        ]:
            self._delete(path)

    def _delete(self, checkpoint: Path) -> None:
        doomed = self.workspace / f"delete-{checkpoint.name}"
        checkpoint.rename(
            doomed
        )  # a kill during the deletion must not leave a partial `checkpoint-<step>`
        shutil.rmtree(doomed, ignore_errors=True)

    def _is_own(self, checkpoint: Path) -> bool:
        return (read_manifest(checkpoint) or {}).get("run") == self.run


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(entries: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(entries).encode())


def _lock(directory: Path) -> Any:
    """Lock a workspace and return its open lock file, or None if another process holds the lock.

    The lock lasts until the file is closed or this process ends. A file system without locks causes only a warning.
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
