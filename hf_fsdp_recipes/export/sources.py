"""The sources of an export's tensors: a sharded model, a checkpoint of DCP, or safetensors files.

DCP is torch's Distributed Checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from transformers import PreTrainedModel

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError, describe, explained
from hf_fsdp_recipes.export.files import OptionalDtype
from hf_fsdp_recipes.loading.checkpoint import Checkpoint, Entry
from hf_fsdp_recipes.saving.resume import check_pickles
from hf_fsdp_recipes.upstream.torch_internals import (
    COMPILED,
    TensorStorageMetadata,
    checkpoint_name,
)
from hf_fsdp_recipes.upstream.transformers_internals import find_tied, set_conversions
from hf_fsdp_recipes.weights.rows import gather


@dataclass(frozen=True)
class Source:
    """One full tensor, which is read only when it is needed."""

    meta: Tensor  # a meta tensor with its shape and dtype
    # Takes a rank; the other ranks may get None. Collective if the tensor is sharded.
    read: Callable[[int], Tensor | None]


Sources = dict[str, Source]


def on_meta(tensor: Tensor, dtype: OptionalDtype) -> Tensor:
    """Return a meta tensor of the same full shape.

    It has the dtype `dtype` if that is given and the tensor is floating-point. Otherwise, it has
    the tensor's dtype.
    """
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def from_model(model: Module, dtype: OptionalDtype = None) -> Sources:
    """Return the tensors of a model's state dict. Collective.

    FSDP2's shards are converted to `dtype` before they are gathered.
    """
    sources = {}
    state = model.state_dict()
    for value in state.values():
        if isinstance(value, DTensor):
            device_type = value.device_mesh.device_type
            if distributed.can_send(device_type):
                distributed.open_default_group(torch.device(device_type))
            break  # all shards are on devices of one type
    for name, value in state.items():
        if isinstance(value, Tensor):  # bitsandbytes also stores strings
            meta = on_meta(value, dtype)
            source = Source(meta, partial(gather, value, meta.dtype))
            sources[checkpoint_name(model, name)] = source
    return sources


def value_source(value: Tensor) -> Source:
    """Return a tensor that every rank holds."""
    return Source(on_meta(value, None), lambda _: value)


def weight_source(
    checkpoint: Checkpoint,
    entry: Entry,
    name: str,
    meta: Tensor,
) -> Source:
    """Return a weight that a rank reads from files. `meta` has its shape."""

    def read(_: int) -> Tensor:
        return checkpoint.read(entry)[name].to(entry.dtype)

    return Source(on_meta(meta, entry.dtype), read)


def _read_tensor(
    reader: dcp.FileSystemReader,
    key: str,
    meta: Tensor,
    rank: int,
) -> Tensor:
    """Return a tensor of a checkpoint, on any rank."""
    tensor = torch.empty_like(meta, device="cpu")
    try:
        dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:  # no subclass of Exception
        raise ExportError(
            f"{key} of {reader.path} is unreadable: {describe(error.failures[0][0])}"
        ) from error
    return tensor


def from_checkpoint(directory: Path) -> Sources:
    """Return the tensors of a DCP checkpoint.

    Their names omit the top-level key `model` that Accelerate adds, if it is there. Raise an
    ExportError if a pickle can run code.
    """
    with explained(ExportError, f"{directory} is unusable"):
        check_pickles(directory)
    reader = dcp.FileSystemReader(directory)
    # Otherwise, it would be read again for each tensor.
    reader.read_metadata = cache(reader.read_metadata)  # type: ignore[method-assign]
    metadata = reader.read_metadata()
    paths = metadata.planner_data or {}
    has_top = any(path[0] == "model" and len(path) > 1 for path in paths.values())
    sources = {}
    for key, entry in metadata.state_dict_metadata.items():
        # A top-level key such as `model.ema` may stand beside `model`.
        is_weight = not has_top or paths[key][0] == "model"
        if is_weight and isinstance(entry, TensorStorageMetadata):
            # Others save compiled models without torch's own function for names.
            name = (key.removeprefix("model.") if has_top else key).replace(COMPILED, "")
            meta = torch.empty(
                entry.size,
                dtype=entry.properties.dtype,
                device="meta",
            )
            sources[name] = Source(meta, partial(_read_tensor, reader, key, meta))
    return sources


def from_weights(checkpoint: Checkpoint, model: PreTrainedModel) -> Sources:
    """Return the weights of a meta model, as `from_pretrained` makes them from a checkpoint.

    They have the dtypes of the files. Exports then have the files' format.
    """
    checkpoint.entries, buffers, conversions = checkpoint.plan(model)
    set_conversions(model, conversions)
    state = model.state_dict()
    sources = {name: value_source(value) for name, value in buffers.items()}
    for entry in checkpoint.entries:
        for name in entry.names:
            sources[name] = weight_source(checkpoint, entry, name, state[name])
    for pair in find_tied(model).items():
        for name, other in (pair, reversed(pair)):
            if other in sources:
                sources.setdefault(name, sources[other])
    return sources


def from_files(checkpoint: Checkpoint) -> Sources:
    """Return the tensors of all safetensors files in a directory."""

    def source(key: str) -> Source:
        stored = checkpoint.slice_of(key)
        # Indexing only maps the file, so no data is read for the meta tensor.
        return Source(on_meta(stored[...], None), lambda rank: stored[...])

    return {key: source(key) for key in checkpoint.file_of}
