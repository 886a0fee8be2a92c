"""Collects the sharded state of model and optimizer, in the layout that Trainer resumes from."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes.checkpointing import fsdp1

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plugin: "FullyShardedDataParallelPlugin"
) -> dict[str, dict[str, Any]]:
    """Return {"model": ..., "optimizer": ...} as sharded tensors; CPU tensors are not copied.

    Collective: every rank must call this. For a LoRA model, only the adapters are returned.
    """
    from accelerate.utils import fsdp_utils
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if plugin.fsdp_version == 1:
        return fsdp1.capture(model, optimizer, plugin)
    options = fsdp_utils._prepare_sd_options(plugin)
    model_state = fsdp_utils._get_model_state_dict(model, adapter_only=True, sd_options=options)
    return {"model": model_state, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


def local_bytes(value: Any) -> int:
    """Return the number of bytes of a state on this rank: full tensors and local shards."""
    if isinstance(value, Mapping):
        return sum(local_bytes(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(local_bytes(inner) for inner in value)
    if hasattr(value, "local_shards"):  # FSDP1's ShardedTensor
        return sum(shard.tensor.nbytes for shard in value.local_shards())
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.nbytes if isinstance(local, torch.Tensor) else 0
