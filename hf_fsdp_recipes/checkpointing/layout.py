"""Names, completes, validates and deletes checkpoint directories.

A checkpoint is complete if its directory is named `checkpoint-<step>` and its files match its manifest, which lists their sizes
and checksums. The manifest is written last, then the directory is renamed. This module uses neither torch nor collectives.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import xxhash

from hf_fsdp_recipes.errors import UNREADABLE, CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
STATE_FILE = "trainer_state.json"
SCALER_FILE = "scaler.pt"  # state of the gradient scaler; in checkpoints of fp16 runs only
STATE_KEY = "hf_fsdp_recipes"  # key in TrainerState's `stateful_callbacks`, which Trainer saves and restores
MODEL_DIRECTORY = "pytorch_model_fsdp_0"
PARTS = {"model": MODEL_DIRECTORY, "optimizer": "optimizer_0"}  # directories of DCP files, in the order of writing
METADATA_FILE = ".metadata"  # torch DCP writes this file to each part's directory
_NAME = re.compile(r"checkpoint-(\d+)")
_INCOMPLETE = re.compile(r"\.checkpoint-(\d+)\.(incomplete|download)")


class ManifestEntry(TypedDict):
    """What a manifest says about one file."""

    bytes: int
    xxh3: str
    blocks: NotRequired[list[str]]  # checksum of each block of a `.distcp` file


@dataclass(frozen=True)
class Checkpoint:
    """A `checkpoint-<step>` directory. `run` is the id of the run that wrote it.

    `fault` says why a run cannot resume from it, and is None if a run can.
    """

    path: Path
    step: int
    fault: str | None
    run: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a run can resume from this checkpoint."""
        return self.fault is None


def is_checkpoint_name(name: str) -> bool:
    """Return whether a directory's name is exactly `checkpoint-<step>`."""
    return _NAME.fullmatch(name) is not None


def is_incomplete_name(name: str) -> bool:
    """Return whether a directory is named like an incomplete save or download."""
    return _INCOMPLETE.fullmatch(name) is not None


def directory_for(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Return the final path of a step's checkpoint."""
    return Path(output_dir) / f"checkpoint-{step}"


def step_of(directory: Path) -> int | None:
    """Return the step of a directory named `checkpoint-<step>`, or None if it has another name."""
    match = _NAME.fullmatch(directory.name)
    return int(match.group(1)) if match else None


def incomplete_directory_for(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Return the path that a step's checkpoint has until it is complete and renamed. Trainer ignores such names."""
    return Path(output_dir) / f".checkpoint-{step}.incomplete"


def download_directory_for(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Return the path to which a step's checkpoint is downloaded. It is renamed when complete; a partial download is not."""
    return Path(output_dir) / f".checkpoint-{step}.download"


def checksum(file: Path) -> str:
    """Return the 64-bit XXH3 of a file in hexadecimal. It detects accidental corruption, not tampering."""
    with file.open("rb", buffering=0) as stream:
        return str(hashlib.file_digest(stream, xxhash.xxh3_64).hexdigest())


def manifest_entries(directory: Path, files: Iterable[str]) -> dict[str, ManifestEntry]:
    """Return {path: size and checksum} for the given files; paths are relative to `directory`."""
    return {
        name: {"bytes": (directory / name).stat().st_size, "xxh3": checksum(directory / name)} for name in sorted(files)
    }


def find_size(file: Path) -> int | None:
    """Return a file's size in bytes, or None if it is not a regular file; raise a CheckpointError if the file system fails."""
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return None
        raise _unreadable(file, error) from error
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read: {error.strerror}. Check the file system, then start again.")


def sync_path(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_in(directory: Path) -> list[str]:
    """Return the paths of all files below a directory, relative to it, without the directory's manifest."""
    found = (file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    return sorted(name for name in found if name != MANIFEST)


def start(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Create the empty directory for a step's checkpoint; delete interrupted saves and downloads. Rank 0 only."""
    incomplete = incomplete_directory_for(output_dir, step)
    try:
        remove_interrupted(output_dir)
        remove_interrupted(output_dir, "download")
        for part in PARTS.values():
            (incomplete / part).mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{incomplete} cannot be created: {error.strerror}. Check path, permissions and free space."
        ) from error
    return incomplete


def remove_interrupted(output_dir: str | os.PathLike[str], kind: str = "incomplete") -> None:
    """Delete interrupted saves or downloads. Call it on one rank only, while no rank writes or reads any of them."""
    for old in Path(output_dir).glob(f".checkpoint-*.{kind}"):
        if is_incomplete_name(old.name):
            old.unlink() if old.is_symlink() else shutil.rmtree(old)


def commit(incomplete: Path, final: Path, files: Mapping[str, ManifestEntry], facts: Mapping[str, object]) -> None:
    """Write the manifest, make everything durable, and give the directory its final name. Rank 0 only."""
    present = set(files_in(incomplete))
    if present != set(files):
        changed = sorted(present ^ set(files))[:3]
        raise CheckpointError(f"{incomplete}: another process added or removed {changed} during the save")
    try:
        _write_manifest(incomplete, files, facts)
        if final.exists():
            set_aside(final)
        incomplete.rename(final)
        sync_path(final.parent)
    except OSError as error:
        raise CheckpointError(
            f"{final} could not be completed: {error.strerror}. Earlier checkpoints are intact."
        ) from error


def complete_in_place(directory: Path, facts: Mapping[str, object]) -> None:
    """Flush a checkpoint that Trainer has written, and add a manifest; raise a CheckpointError if the disk fails. Rank 0 only."""
    try:
        (directory / MANIFEST).unlink(missing_ok=True)
        names = files_in(directory)
        for name in names:
            sync_path(directory / name)
        _write_manifest(directory, manifest_entries(directory, names), facts)
        sync_path(directory.parent)
    except OSError as error:
        raise CheckpointError(
            f"{directory} could not be completed: {error.strerror}. Earlier checkpoints are intact."
        ) from error


def _write_manifest(directory: Path, files: Mapping[str, ManifestEntry], facts: Mapping[str, object]) -> None:
    manifest = {"format": MANIFEST_FORMAT, **facts, "files": {name: dict(files[name]) for name in sorted(files)}}
    part = directory / f"{MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1))
    sync_path(part)
    part.replace(directory / MANIFEST)
    for each in {directory, *((directory / name).parent for name in files)}:
        sync_path(each)


def set_aside(path: Path) -> Path:
    """Rename a directory to `<name>.set-aside-<n>` instead of deleting it, and log a warning with both names."""
    number = 0
    while (target := path.with_name(f"{path.name}.set-aside-{number}")).exists():
        number += 1
    path.rename(target)
    logger.warning("renamed %s to %s, which is kept but not resumed from", path, target.name)
    return target


def validate(directory: Path, verify: bool = False, part: int = 0, num_parts: int = 1) -> str | None:
    """Return why a checkpoint cannot be resumed from, or None if it can.

    Checks the names and sizes of all files. With `verify`, also checks the checksum of every `num_parts`-th file, starting
    with file number `part` and the largest files first.

    Raises:
        CheckpointError: the file system fails, so it is unknown whether the checkpoint is complete.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = {str(name): (int(entry["bytes"]), str(entry["xxh3"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"no {MANIFEST}: the save did not finish, or another program wrote the checkpoint"
    except UNREADABLE as error:
        if isinstance(error, OSError) and not isinstance(error, IsADirectoryError | NotADirectoryError):
            raise _unreadable(directory / MANIFEST, error) from error
        return f"{MANIFEST} cannot be read ({error!r})"
    step = step_of(directory)
    if step is not None and manifest.get("step") != step:
        return f"{MANIFEST} is for step {manifest.get('step')}, not {step}"
    by_size = sorted(files.items(), key=lambda item: (-item[1][0], item[0]))
    for number, (name, (num_bytes, expected)) in enumerate(by_size):
        file = directory / name
        found = find_size(file)
        if found is None:
            return f"{name} is missing"
        if found != num_bytes:
            return f"{name} has {found:,} bytes, not {num_bytes:,}"
        if verify and number % num_parts == part and checksum(file) != expected:
            return f"{name} has changed: its checksum differs"
    return None


def list_checkpoints(output_dir: str | os.PathLike[str], verify: bool = False) -> list[Checkpoint]:
    """Return all checkpoints in an output directory, complete or not, sorted by step."""
    found = []
    directory = Path(output_dir)
    for path in directory.iterdir() if directory.is_dir() else ():
        step = step_of(path)
        if step is not None and path.is_dir():
            run = (read_manifest(path) or _read_run_facts(path)).get("run")
            found.append(Checkpoint(path, step, validate(path, verify), run))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, or an empty dict if it cannot be read."""
    return read_json(directory / MANIFEST)


def _read_run_facts(directory: Path) -> dict[str, Any]:
    """Return what this package stored in the checkpoint's Trainer state, such as the run's id; an empty dict if nothing."""
    callbacks = read_json(directory / STATE_FILE).get("stateful_callbacks")
    facts = callbacks.get(STATE_KEY) if isinstance(callbacks, dict) else None
    return facts if isinstance(facts, dict) else {}


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty dict if it cannot be read."""
    try:
        content = json.loads(file.read_text())
    except UNREADABLE:
        return {}
    return content if isinstance(content, dict) else {}


def quarantine_incomplete(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Rename checkpoints that cannot be resumed from, so that no tool mistakes them for complete ones. Rank 0 only.

    Two kinds keep their names: a stock Trainer's checkpoints, which have no manifest, and interrupted saves, which the next
    save deletes.

    Returns:
        The new paths.
    """
    incomplete = [checkpoint for checkpoint in list_checkpoints(output_dir) if not checkpoint.is_complete]
    return [set_aside(checkpoint.path) for checkpoint in incomplete if (checkpoint.path / MANIFEST).is_file()]


def remove_old(
    output_dir: str | os.PathLike[str], keep: int, protect: Iterable[Path | str] = (), run: str | None = None
) -> list[Path]:
    """Delete a run's oldest complete checkpoints until `keep` are left, and return their paths. Rank 0 only.

    Never deletes the newest checkpoint, those in `protect` or symbolic links, even if more than `keep` are left then. Call it
    after a newer checkpoint is complete. Only directories named exactly `checkpoint-<step>` whose manifest
    has the id `run` are counted and deleted.
    """
    old = find_old([one for one in list_checkpoints(output_dir) if one.run == run], keep, protect)
    links = [checkpoint.path for checkpoint in old if checkpoint.path.is_symlink()]
    if links:
        logger.warning("old checkpoints that are symbolic links are not deleted: %s", ", ".join(map(str, links)))
    removed = [checkpoint.path for checkpoint in old if checkpoint.path not in links]
    for path in removed:
        shutil.rmtree(path)
    return removed


def find_old(checkpoints: Iterable[Checkpoint], keep: int, protect: Iterable[Path | str] = ()) -> list[Checkpoint]:
    """Return the oldest complete checkpoints, to be deleted so that `keep` are left.

    Never returns the newest or those in `protect`. `checkpoints` are those of one run, sorted by step.
    """
    protected = {Path(path).resolve() for path in protect}
    complete = [checkpoint for checkpoint in checkpoints if checkpoint.is_complete]
    candidates = [checkpoint for checkpoint in complete[:-1] if checkpoint.path.resolve() not in protected]
    return candidates[: max(0, len(complete) - keep)]
