"""The sources of an export's tensors: a sharded model, a checkpoint of torch DCP, or safetensors files."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.directory import MANIFEST
from hf_fsdp_recipes.checkpointing.resume import check_pickles, find_damage
from hf_fsdp_recipes.errors import ExportError, describe
from hf_fsdp_recipes.export.files import DTYPES
from hf_fsdp_recipes.loading.checkpoint import Checkpoint
from hf_fsdp_recipes.upstream.torch_internals import WRAPPERS, TensorStorageMetadata


@dataclass(frozen=True)
class Source:
    """One full tensor, which is read only when it is needed."""

    meta: torch.Tensor  # a meta tensor with its shape and dtype
    # Takes a rank, and host memory in which the tensor may be returned. Other ranks may get None.
    read: Callable[[int, torch.Tensor], torch.Tensor | None]
    is_collective: bool = (
        False  # True: all ranks must call `read`. False: only the given rank needs to
    )


def on_meta(shape: torch.Size, held: torch.dtype, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a meta tensor of this shape. Its dtype is `held`, or `dtype` if that is given and `held` is floating-point."""
    return torch.empty(
        shape, dtype=dtype if dtype is not None and held.is_floating_point else held, device="meta"
    )


def from_model(model: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, Source]:
    """Return the tensors of a model's state dict. Collective.

    FSDP2's shards are converted to `dtype` before they are gathered.
    """
    sources = {}
    state = model.state_dict()
    sharded = next((value for value in state.values() if isinstance(value, DTensor)), None)
    if sharded is not None and distributed.can_send(sharded.device_mesh.device_type):
        distributed.open_default_group(torch.device(sharded.device_mesh.device_type))
    for name, value in state.items():
        if isinstance(value, torch.Tensor):  # bitsandbytes also stores strings
            meta = on_meta(value.shape, value.dtype, dtype)
            read = functools.partial(_gather, value.detach(), meta.dtype)
            sources[WRAPPERS.sub("", name)] = Source(meta, read, isinstance(value, DTensor))
    return sources


def _gather(
    value: torch.Tensor, dtype: torch.dtype, writer: int, memory: torch.Tensor
) -> torch.Tensor | None:
    """Return the full tensor on rank `writer`. Other ranks may get None. Collective if `value` is a DTensor."""
    value = value.to(dtype)
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    replicas = mesh.mesh.reshape(-1, mesh.size(-1)).tolist()  # each row of HSDP's mesh is one
    ranks = next((row for row in replicas if writer in row), None)
    *outer, inner = value.placements
    is_sharded = inner == Shard(0) and all(placement.is_replicate() for placement in outer)
    if ranks is None or not is_sharded:
        return value.to(mesh.device_type).full_tensor()  # the shards may be offloaded to the CPU
    device_type = mesh.device_type if distributed.can_send(mesh.device_type) else "cpu"
    local = value.to_local().to(device_type).contiguous()
    own = dist.get_rank()
    if own != writer:
        _exchange([dist.P2POp(dist.isend, local, writer)] if own in ranks and local.numel() else [])
        return None
    if local.device.type != "cpu":  # its allocator reuses memory by itself
        memory = torch.empty(value.nbytes, dtype=torch.uint8, device=local.device)
    full = _view(memory, value)
    parts = dict(
        zip(ranks, full.chunk(len(ranks)), strict=False)
    )  # the last ranks may have no part
    requests = [dist.P2POp(dist.irecv, part, rank) for rank, part in parts.items() if rank != own]
    if own in parts:
        parts[own].copy_(local)
    _exchange(requests)
    return full


def _view(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def _exchange(requests: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(requests) if requests else ():
        request.wait()


def from_checkpoint(directory: Path) -> dict[str, Source]:
    """Return the tensors of a torch DCP checkpoint. Names omit the top-level key `model` that Accelerate adds."""
    if damage := (directory.parent / MANIFEST).is_file() and find_damage(
        directory.parent, prefix=directory.name
    ):
        raise ExportError(
            f"{directory.parent} cannot be exported: {damage}. Export another checkpoint."
        )
    try:
        check_pickles(directory)
    except Exception as error:  # a forged pickle can raise any error
        raise ExportError(f"{directory} is unusable: {describe(error)}") from error
    reader = dcp.FileSystemReader(directory)
    reader.read_metadata = functools.cache(reader.read_metadata)  # read once, not for each tensor
    metadata = reader.read_metadata()
    tensors = {
        k: v
        for k, v in metadata.state_dict_metadata.items()
        if isinstance(v, TensorStorageMetadata)
    }
    paths = {key: (metadata.planner_data or {}).get(key, (key,)) for key in tensors}
    tops = {
        path[0] for path in paths.values() if len(path) > 1
    }  # {"model"}; empty for a plain state dict
    top = "model" if "model" in tops else next(iter(tops), None)
    names = {
        key: ".".join(map(str, path[1:])) if top else key
        for key, path in paths.items()
        if top in (None, path[0])
    }

    def read(key: str, meta: torch.Tensor, _: int, memory: torch.Tensor) -> torch.Tensor:
        tensor = _view(memory, meta)
        try:
            dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:  # no subclass of Exception
            raise ExportError(
                f"{key} of {directory} is unreadable: {describe(error.failures[0][0])}"
            ) from error
        return tensor

    def source(key: str) -> Source:
        meta = on_meta(tensors[key].size, tensors[key].properties.dtype)
        return Source(meta, functools.partial(read, key, meta))

    return {WRAPPERS.sub("", name): source(key) for key, name in names.items()}


def from_files(checkpoint: Checkpoint) -> dict[str, Source]:
    """Return the tensors of all safetensors files in a directory."""

    def source(key: str) -> Source:
        part = checkpoint.slice_of(key)
        return Source(on_meta(part.get_shape(), DTYPES[part.get_dtype()]), lambda *_: part[...])

    return {key: source(key) for key in checkpoint.file_of}
