"""What this rank holds of each parameter, as one flat run of elements, whatever cut the model.

FSDP2 cuts rows, FSDP1 cuts a flattened unit anywhere, hybrid sharding holds copies; all of it is "elements
[first, first + count) of parameter X", and that is all that saving and exporting need. Copies nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.loading import names


@dataclass(frozen=True)
class Slice:
    """This rank's part of one parameter or buffer.

    Attributes:
        name: without the wrappers of FSDP1, activation checkpointing and torch.compile; PEFT's names stay.
        shape: the whole parameter's.
        dtype: as it is held.
        first: the first element held, in the parameter's row-major order.
        values: the elements held (1-D; empty where this rank holds none or only a copy of another rank's).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    values: torch.Tensor


def local_slices(model: torch.nn.Module) -> dict[str, Slice]:
    """Return this rank's slices of all parameters and persistent buffers, tied ones once, in state-dict order.

    Every rank gets the same names, shapes and dtypes; over all ranks each element is held exactly once.
    Every rank calls this; no collective.

    Raises:
        ExportError: a placement that is neither cut on dimension 0 nor copied.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    slices: dict[str, Slice] = {}
    is_fsdp1 = any(isinstance(module, FSDP) for module in model.modules())
    flat = dict(_fsdp1_slices(model)) if is_fsdp1 else {}
    seen: set[int] = set()
    for full_name, tensor in [*model.named_parameters(remove_duplicate=False), *_persistent_buffers(model)]:
        name = names.without_wrappers(full_name)
        if id(tensor) in seen or name in slices:
            continue
        seen.add(id(tensor))
        if name in flat:
            slices[name] = flat[name]
        elif not _is_flat(tensor):
            slices[name] = _plain_slice(name, tensor)
    order = [names.without_wrappers(name) for name in _module_order(model)]
    # FSDP1 leaves the tensors of a unit wherever it flattened them; what only lives there comes in as well.
    slices.update({name: piece for name, piece in flat.items() if name not in slices})
    places = {name: number for number, name in enumerate(order)}
    return dict(sorted(slices.items(), key=lambda item: places.get(item[0], len(places))))


def _module_order(model: torch.nn.Module) -> Iterator[str]:
    """Yield names in the order of a state dict: a module's parameters, its buffers, then its children's."""
    for module_name, module in model.named_modules():
        for leaf in [*module._parameters, *module._buffers]:
            yield f"{module_name}.{leaf}".lstrip(".")


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for module_name, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{module_name}.{leaf}".lstrip("."), buffer


def _is_flat(tensor: torch.Tensor) -> bool:
    from torch.distributed.fsdp._flat_param import FlatParameter

    return isinstance(tensor, FlatParameter)


def _plain_slice(name: str, tensor: Any) -> Slice:
    """Describe an FSDP2 parameter (a DTensor), or a tensor that every rank holds whole (rank 0's counts)."""
    shape = tuple(tensor.shape)
    data = tensor.detach()
    if not hasattr(tensor, "device_mesh"):
        values = data.reshape(-1) if distributed.is_main() else data.reshape(-1)[:0]
        return Slice(name, shape, data.dtype, 0, values)
    first, is_copy = _place(name, tensor)
    local = data.to_local().reshape(-1)
    return Slice(name, shape, data.dtype, first, local[:0] if is_copy else local)


def _place(name: str, tensor: Any) -> tuple[int, bool]:
    """Return the first element that this rank holds, and whether it is only a copy of another rank's."""
    from torch.distributed.tensor import Shard

    first, is_copy = 0, False
    coordinate = tensor.device_mesh.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            is_copy = is_copy or coordinate[dim] != 0
        elif placement == Shard(0) and first == 0:
            rows, num_members = (tensor.shape[0] if tensor.ndim else 1), tensor.device_mesh.size(dim)
            row_elements = tensor.numel() // rows if rows else 0
            first = min(coordinate[dim] * -(-rows // num_members), rows) * row_elements
        else:
            raise ExportError(f"{name} is placed as {tuple(tensor.placements)}. Rule: cut on dimension 0 or copied.")
    return first, is_copy


def _fsdp1_slices(model: torch.nn.Module) -> Iterator[tuple[str, Slice]]:
    """Yield the slices that FSDP1's flat parameters hold on this rank.

    Source: torch 2.13 `distributed/fsdp/_flat_param.py`, `FlatParamHandle` and `_ShardParamInfo`.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    prefixes = {id(module): name for name, module in model.named_modules()}
    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        if handle is None:
            continue
        flat = handle.flat_param
        if not hasattr(flat, "_shard_param_infos"):
            raise ExportError("torch's FSDP1 keeps its flat parameters differently now. Remedy: torch 2.11 to 2.13.")
        is_copy = _is_fsdp1_copy(module, handle)
        infos = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
        for (leaf, owner, _), shape, info in infos:
            name = names.without_wrappers(f"{prefixes[id(owner)]}.{leaf}")
            start, count = (info.offset_in_shard, info.numel_in_shard) if info.in_shard and not is_copy else (0, 0)
            values = flat.detach().reshape(-1)[start : start + count]
            yield name, Slice(name, tuple(shape), flat.dtype, info.intra_param_start_idx or 0, values)


def _is_fsdp1_copy(module: Any, handle: Any) -> bool:
    if not handle.uses_sharded_strategy:
        return distributed.rank() != 0
    inter_node = getattr(module, "_inter_node_pg", None)
    return inter_node is not None and dist.get_rank(inter_node) != 0


def gather_whole(piece: Slice, device: torch.device) -> torch.Tensor:
    """Return a small parameter whole, on every rank. Collective: every rank must call this."""
    num_elements = 1
    for size in piece.shape:
        num_elements *= size
    whole = torch.zeros(num_elements, dtype=piece.dtype, device=device)
    whole[piece.first : piece.first + piece.values.numel()] = piece.values.to(device)
    if distributed.is_distributed():
        dist.all_reduce(whole)
    return whole.reshape(piece.shape)
