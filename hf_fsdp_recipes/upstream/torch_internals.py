"""Names of torch that are private or not in its documentation, and why each is needed."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,  # what a `.metadata` file holds
    TensorStorageMetadata,  # marks tensors in it
)
from torch.distributed.checkpoint.state_dict import _get_fqns  # names without wrappers
from torch.distributed.launcher.api import ChildFailedError, SignalException  # how a launch fails
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef  # tells views from other tensors

from hf_fsdp_recipes.upstream.versions import check

# The classes and functions that a pickled `.metadata` file may name. Loading these runs no code
# from the file.
PICKLED_IN_METADATA = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}

COMPILED = "_orig_mod."  # what torch.compile adds to the names of tensors

# `Module.to` asks it whether a parameter can get other data.
ASK_FOR_COPY = "_has_compatible_shallow_copy_type"

# Makes a parameter of a class without calling the class, which may take other arguments.
make_parameter = torch.Tensor._make_subclass

# Runs an operation on tensors of a subclass as if they were plain tensors.
run_on_plain_tensors = torch._C._disabled_torch_function_impl


def checkpoint_name(model: torch.nn.Module, name: str) -> str:
    """Return the name in checkpoints of a tensor in a model's state dict, without wrappers.

    torch.compile and activation checkpointing wrap modules, which adds to the names.
    """
    with suppress(AttributeError):  # bitsandbytes stores values that are no tensors of the model
        [name] = _get_fqns(model, name)
    return name


def set_local_tensor(sharded: DTensor, local: torch.Tensor) -> None:
    """Replace the tensor that a DTensor wraps.

    `DTensor.from_local` would copy paged memory to the device, because it counts as CPU memory.
    """
    check(
        hasattr(sharded, "_local_tensor"),
        "torch",
        "_local_tensor",
        "optimizers of torch work without it",
    )
    sharded._local_tensor = local


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in PICKLED_IN_METADATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which torch does not write there"
        )


def load_metadata(stream: BinaryIO) -> Metadata:
    """Return what a `.metadata` file holds. Raises an UnpicklingError if it would run code."""
    return _MetadataUnpickler(stream).load()


def check_saving() -> None:
    """Raise a PatchError if torch lacks an attribute that each save sets."""
    remains = "load_model and export_model work without it"
    writer = FileSystemWriter("")
    check(hasattr(DefaultSavePlanner(), "_cached_plans_key"), "torch", "_cached_plans_key", remains)
    check(hasattr(writer, "fs"), "torch", "fs", remains)
    check(hasattr(writer.fs, "create_stream"), "torch", "create_stream", remains)


def make_writer(folder: Path, open_file: Callable) -> FileSystemWriter:
    """Return a writer that opens its files with `open_file(path, mode)`, a context manager."""
    # By default, torch copies tensors before it writes them. This copy synchronizes the stream that
    # training uses. `open_file` flushes files to disk, so `sync_files` is not needed.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0, sync_files=False)
    writer.fs.create_stream = open_file  # type: ignore[method-assign]
    return writer


def make_save_planner(folder: str) -> DefaultSavePlanner:
    """Return a planner that sends a rank's plan only when it changes. Each folder has its own."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = folder
    return planner
