"""Checkpoint directories: how they are named, when one is complete, which is the newest, which may go.

A checkpoint exists when its directory has the final name and holds a manifest that its files agree with; the
manifest is written last and the name is given by one rename. Files and paths only: no torch, no ranks.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from hf_fsdp_recipes.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
LOCK_FILE = ".writer.lock"
STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_INCOMPLETE = re.compile(r"\.checkpoint-(\d+)\.incomplete")
_READ_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Checkpoint:
    """One `checkpoint-<step>` directory and what speaks against resuming from it (None if nothing does)."""

    path: Path
    step: int
    fault: str | None

    @property
    def is_complete(self) -> bool:
        """Whether it can be resumed from."""
        return self.fault is None


def is_checkpoint_name(name: str) -> bool:
    """Tell whether a directory's name is exactly `checkpoint-<step>`."""
    return _NAME.fullmatch(name) is not None


def directory_for(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Return the final name of a step's checkpoint."""
    return Path(output_dir) / f"checkpoint-{step}"


def incomplete_directory_for(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Return the name under which a step's checkpoint is written; Trainer does not take it for one."""
    return Path(output_dir) / f".checkpoint-{step}.incomplete"


def checksum(file: Path) -> str:
    """Return the XXH3 (64 bit) of a file's bytes in hexadecimal: as fast as memory, for accidents, not for attacks."""
    value = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_READ_BYTES):
            value.update(block)
    return value.hexdigest()


def describe_files(directory: Path, files: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return bytes and checksum of files, by their path relative to `directory`."""
    return {
        name: {"bytes": (directory / name).stat().st_size, "xxh3": checksum(directory / name)} for name in sorted(files)
    }


def files_in(directory: Path) -> list[str]:
    """List all files below a directory, relative to it, the manifest aside."""
    found = (file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    return sorted(name for name in found if name != MANIFEST)


def commit(incomplete: Path, final: Path, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the manifest, make everything durable, and give the directory its name. Main rank only.

    Raises:
        CheckpointError: a file that was written is not there any more, or the disk refuses.
    """
    present = set(files_in(incomplete))
    if present != set(files):
        odd = sorted(present ^ set(files))[:3]
        raise CheckpointError(f"{incomplete}: {odd} were written and are gone, or appeared by themselves")
    manifest = {"format": MANIFEST_FORMAT, **facts, "files": {name: dict(files[name]) for name in sorted(files)}}
    try:
        with (incomplete / MANIFEST).open("w") as stream:
            json.dump(manifest, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        for directory in {incomplete, *((incomplete / name).parent for name in files)}:
            _sync_directory(directory)
        if final.exists():
            _set_aside(final)
        incomplete.rename(final)
        _sync_directory(final.parent)
    except OSError as error:
        raise CheckpointError(
            f"{final} could not be completed: {error.strerror}. Earlier checkpoints are intact."
        ) from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(path: Path) -> Path:
    """Rename something that is in the way; nothing is deleted unasked."""
    number = 0
    while (target := path.with_name(f"{path.name}.set-aside-{number}")).exists():
        number += 1
    path.rename(target)
    logger.warning("%s was in the way and is now %s", path, target.name)
    return target


def validate(directory: Path, verify: bool = False) -> str | None:
    """Return why a checkpoint cannot be resumed from, or None. Looks at names and sizes; reads bytes with `verify`."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = {str(name): (int(entry["bytes"]), str(entry["xxh3"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"no {MANIFEST}: the save did not finish, or another program wrote it"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error!r})"
    match = _NAME.fullmatch(directory.name)
    if match and manifest.get("step") != int(match.group(1)):
        return f"{MANIFEST} is of step {manifest.get('step')}"
    for name, (num_bytes, expected) in files.items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != num_bytes:
            return f"{name} has {file.stat().st_size:,} bytes, not {num_bytes:,}"
        if verify and checksum(file) != expected:
            return f"{name} has been altered (its checksum differs)"
    return None


def list_checkpoints(output_dir: str | os.PathLike[str], verify: bool = False) -> list[Checkpoint]:
    """Return all checkpoints of a run, oldest step first, complete or not."""
    found = []
    directory = Path(output_dir)
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Checkpoint(path, int(match.group(1)), validate(path, verify)))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def format_table(checkpoints: Iterable[Checkpoint]) -> str:
    """Return a table of checkpoints: step, size, ranks, loss, and whether each is complete or why not."""
    lines = [f"{'step':>8}  {'size':>10}  {'ranks':>5}  {'loss':>8}  state"]
    for checkpoint in checkpoints:
        manifest = _read_manifest(checkpoint.path)
        num_bytes = sum((checkpoint.path / name).stat().st_size for name in files_in(checkpoint.path))
        loss = manifest.get("loss")
        lines.append(
            f"{checkpoint.step:>8}  {_readable(num_bytes):>10}  {manifest.get('world_size', '?'):>5}  "
            f"{'?' if loss is None else format(loss, '.4f'):>8}  {checkpoint.fault or 'complete'}"
        )
    return "\n".join(lines)


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _readable(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def check_named(directory: Path) -> None:
    """Check a checkpoint that somebody named to resume from.

    One without a manifest (a stock Trainer's) is taken at its owner's word, with a warning.

    Raises:
        CheckpointError: it is not there, or it is not what its manifest says; names the file.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is no checkpoint directory. Remedy: a path, or auto for the newest complete one."
        )
    if not (directory / MANIFEST).is_file():
        logger.warning("%s has no %s, so nobody can tell whether it is whole; going on as asked", directory, MANIFEST)
        return
    fault = validate(directory, verify=True)
    if fault is not None:
        raise CheckpointError(f"{directory} cannot be resumed from: {fault}. Remedy: an earlier one; auto finds it.")


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a run, or None.

    Torn and altered ones are named in a warning and passed over; nothing is changed on disk. Sizes of all
    files are checked, and the newest one's checksums.
    """
    for checkpoint in reversed(list_checkpoints(output_dir)):
        fault = checkpoint.fault or validate(checkpoint.path, verify=True)
        if fault is None:
            return checkpoint.path
        logger.warning("%s is not resumed from: %s", checkpoint.path, fault)
    return None


def quarantine_incomplete(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Rename what cannot be resumed from, so that nothing takes it for a checkpoint. Main rank only.

    Returns:
        The new names. Directories of interrupted saves keep theirs; the next save of that step replaces them.
    """
    torn = [checkpoint for checkpoint in list_checkpoints(output_dir) if not checkpoint.is_complete]
    # A stock Trainer's checkpoints have no manifest and are none of ours to move.
    return [_set_aside(checkpoint.path) for checkpoint in torn if (checkpoint.path / MANIFEST).is_file()]


def remove_old(output_dir: str | os.PathLike[str], keep: int, protect: Iterable[Path | str] = ()) -> list[Path]:
    """Delete the oldest complete checkpoints beyond `keep`, never the newest or a protected one. Main rank only.

    Call it only after a newer one is complete. Only directories named exactly `checkpoint-<step>` go.
    """
    protected = {Path(path).resolve() for path in protect}
    complete = [checkpoint for checkpoint in list_checkpoints(output_dir) if checkpoint.is_complete]
    candidates = [checkpoint for checkpoint in complete[:-1] if checkpoint.path.resolve() not in protected]
    removed = []
    for checkpoint in candidates[: max(0, len(complete) - keep)]:
        shutil.rmtree(checkpoint.path)
        removed.append(checkpoint.path)
    return removed


def lock(output_dir: str | os.PathLike[str], wait_seconds: float = 60.0) -> IO[str]:
    """Take the right to write checkpoints into a directory; hold the returned file as long as you do.

    Main rank only. Keeps a run apart from what is left of the run that it replaces. Filesystems without locks
    give everybody the right.

    Raises:
        CheckpointError: another process still holds it after `wait_seconds`, or the directory cannot be written.
    """
    path = Path(output_dir) / LOCK_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+")
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} cannot be written: {error.strerror}. Remedy: check permissions."
        ) from error
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                stream.seek(0)
                raise CheckpointError(
                    f"{output_dir} is in use by another run ({stream.read().strip()}). Rule: one run a directory. Remedy: end "
                    f"that run, or choose another output_dir."
                ) from error
            time.sleep(0.5)
        except OSError:
            break  # no locks here
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    stream.flush()
    return stream


def start(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Make the empty directory that a step is written into, replacing an interrupted attempt. Main rank only.

    Raises:
        CheckpointError: no permission, no room.
    """
    incomplete = incomplete_directory_for(output_dir, step)
    try:
        for old in Path(output_dir).glob(".checkpoint-*.incomplete") if Path(output_dir).is_dir() else ():
            if _INCOMPLETE.fullmatch(old.name):
                shutil.rmtree(old)
        incomplete.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{incomplete} cannot be created: {error.strerror}. Remedy: check path, permissions and free space."
        ) from error
    return incomplete
