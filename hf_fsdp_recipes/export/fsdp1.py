"""Finds this rank's slices of FSDP1's flat parameters.

Source: torch 2.13 `distributed/fsdp/_flat_param.py`, `FlatParamHandle` and `_ShardParamInfo`.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._flat_param import FlatParameter

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.loading.shard_layout import Slice
from hf_fsdp_recipes.parameter_names import without_wrappers

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle


def is_flat(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is a flat parameter of FSDP1."""
    return isinstance(tensor, FlatParameter)


def flat_slices(model: torch.nn.Module) -> dict[str, Slice]:
    """Map each parameter that FSDP1 has flattened to this rank's slice of it. Under FSDP2, the result is empty."""
    slices: dict[str, Slice] = {}
    prefixes = {id(module): name for name, module in model.named_modules()}
    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        if handle is None:
            continue
        flat, is_replica = handle.flat_param, _is_replica(module, handle)
        infos = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
        for (leaf, owner, _), shape, info in infos:
            name = without_wrappers(f"{prefixes[id(owner)]}.{leaf}")
            is_held = info.in_shard and not is_replica
            start, count = (info.offset_in_shard, info.numel_in_shard) if is_held else (0, 0)
            values = flat.detach().reshape(-1)[start : start + count]
            slices[name] = Slice(name, tuple(shape), flat.dtype, info.intra_param_start_idx or 0, values)
    return slices


def _is_replica(module: torch.nn.Module, handle: "FlatParamHandle") -> bool:
    if not handle.uses_sharded_strategy:
        return not distributed.is_main()
    inter_node = getattr(module, "_inter_node_pg", None)
    return inter_node is not None and dist.get_rank(inter_node) != 0
