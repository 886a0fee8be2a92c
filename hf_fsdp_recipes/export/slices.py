"""Finds this rank's slice of each parameter, under any sharding, without copying.

FSDP2 shards each parameter by rows, FSDP1 shards a flattened unit, and hybrid sharding adds replicas. In every case a rank
holds elements [first, first + count) of a parameter.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export import fsdp1
from hf_fsdp_recipes.loading.shard_layout import Slice, find_shard
from hf_fsdp_recipes.parameter_names import without_wrappers


def local_slices(model: torch.nn.Module) -> dict[str, Slice]:
    """Return this rank's slices of all parameters and persistent buffers, in state-dict order; tied tensors appear once.

    Every rank gets the same names, shapes and dtypes, and each element is in exactly one rank's slice. Not a collective. Raises
    an ExportError for a parameter that is neither sharded on dimension 0 nor replicated.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass without a backward pass leaves low-precision copies in place of some parameters
    slices: dict[str, Slice] = {}
    names = [*model.named_parameters(remove_duplicate=False), *_persistent_buffers(model)]
    copies = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in getattr(module, "all_tied_weights_keys", None) or ()
    }
    # Tied tensors are written under the name that from_pretrained expects.
    names.sort(key=lambda item: item[0] in copies)
    flat = fsdp1.flat_slices(model)
    seen: set[int] = set()
    for full_name, tensor in names:
        name = without_wrappers(full_name)
        if id(tensor) in seen or name in slices:
            continue
        seen.add(id(tensor))
        if name in flat:
            slices[name] = flat[name]
        elif not fsdp1.is_flat(tensor):
            slices[name] = _slice(name, tensor)
    slices = flat | slices
    leaves = (
        f"{name}.{leaf}" for name, module in model.named_modules() for leaf in [*module._parameters, *module._buffers]
    )
    order = {without_wrappers(name.lstrip(".")): number for number, name in enumerate(leaves)}
    return dict(sorted(slices.items(), key=lambda item: order.get(item[0], len(order))))


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for module_name, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{module_name}.{leaf}".lstrip("."), buffer


def _slice(name: str, tensor: torch.Tensor) -> Slice:
    """Return the slice of an FSDP2 parameter (a DTensor), or of a replicated tensor, which only rank 0 writes."""
    shape, data = tuple(tensor.shape), tensor.detach()
    if not isinstance(data, DTensor):
        values = data.reshape(-1)
        return Slice(name, shape, data.dtype, 0, values if distributed.is_main() else values[:0])
    found = find_shard(data)
    if found is None:
        raise ExportError(
            f"{name} has placements {tuple(data.placements)}; only sharding on dimension 0 and replication can be exported."
        )
    first, _, is_replica = found
    local = data.to_local().reshape(-1)
    return Slice(name, shape, data.dtype, first, local[:0] if is_replica else local)


def gather_full(piece: Slice, device: torch.device) -> torch.Tensor:
    """Gather a small parameter in full on every rank. Collective: every rank must call this."""
    full = torch.zeros(torch.Size(piece.shape).numel(), dtype=piece.dtype, device=device)
    full[piece.first : piece.first + piece.values.numel()] = piece.values.to(device)
    if distributed.is_distributed():
        dist.all_reduce(full)
    return full.reshape(piece.shape)
