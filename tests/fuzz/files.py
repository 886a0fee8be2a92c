"""Describes the files of a run, with what is in them."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.fuzz.values import hash_bytes, hashed, plain, trainer_state

# {directory: {file: contents}}. The directory of a checkpoint's file is the checkpoint.
Files = dict[str, dict[str, Any]]
UNITS = ("checkpoint-", "_saving", "_set-aside")
# Their contents differ from run to run, or are read with another file.
UNREAD = ("training_args.bin", "manifest.json", "lock", "run.json")


def describe(place: Path) -> Files:
    """Return all files under a directory. Of empty directories, only those of saves count."""
    found: Files = {}
    for path in sorted(place.rglob("*")):
        directory = directory_of(path, place)
        files = found.setdefault(str(directory.relative_to(place)), {})
        if path.is_symlink() or not path.is_dir():
            files[str(path.relative_to(directory))] = attempt_contents(path, place)
    return {name: files for name, files in found.items() if files or is_unit(name)}


def is_unit(directory: str) -> bool:
    return Path(directory).name.startswith(UNITS)


def directory_of(path: Path, place: Path) -> Path:
    """Return the checkpoint or other unit to which a path belongs, or the path's own directory."""
    parents = [*reversed(path.relative_to(place).parents), path.relative_to(place)]
    for parent in parents:
        directory = place / parent
        if is_unit(parent.name) and directory.is_dir() and not directory.is_symlink():
            return directory
    is_directory = path.is_dir() and not path.is_symlink()
    return path if is_directory else path.parent


def attempt_contents(path: Path, place: Path) -> Any:
    try:
        return contents(path, place)
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        return f"unreadable: {type(error).__name__}: {error}"


def contents(path: Path, place: Path) -> Any:
    """Return what a file says, without times and absolute paths."""
    if path.is_symlink():
        return "symbolic link"
    if path.suffix == ".distcp" or path.name in UNREAD:
        return "present"
    if path.name == ".metadata":
        return read_shards(path.parent)
    if path.name == "trainer_state.json":
        return trainer_state(json.loads(path.read_text()), place)
    if path.suffix == ".json":
        return plain(json.loads(path.read_text()))
    if path.suffix == ".safetensors":
        return hashed(load_file(path))
    if path.suffix in (".pt", ".pth", ".bin"):
        return hashed(torch.load(path, weights_only=False))
    return hash_bytes(path.read_bytes())


def read_shards(directory: Path) -> Any:
    """Return all tensors of a directory of torch DCP."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(directory),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return hashed(state)
