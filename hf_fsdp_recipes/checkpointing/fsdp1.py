"""Copies the sharded state of an FSDP1 model and its optimizer."""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plugin: "FullyShardedDataParallelPlugin"
) -> dict[str, dict[str, Any]]:
    """Return a copy of the sharded state of an FSDP1 model and its optimizer. Collective: every rank must call this.

    The copy is on the accelerator if every rank has room for it there, and in host memory otherwise.
    """
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    has_room = all(distributed.gather_objects(_has_room_on_device(model, optimizer)))
    if not has_room:
        _warn_of_waits()
    configs = (
        replace(config, offload_to_cpu=not has_room)
        for config in (plugin.state_dict_config, plugin.optim_state_dict_config)
    )
    with FSDP.state_dict_type(model, plugin.state_dict_type, *configs):
        model_state = fsdp_utils._get_model_state_dict(model, adapter_only=True)
        return {"model": model_state, "optimizer": FSDP.optim_state_dict(model, optimizer)}


def _has_room_on_device(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a copy of this rank's shards fits into its accelerator's free memory."""
    states = (value for state in optimizer.state.values() for value in state.values())
    shards = [tensor for tensor in (*model.parameters(), *states) if isinstance(tensor, torch.Tensor)]
    num_bytes = sum(tensor.nbytes for tensor in shards if tensor.device.type != "cpu")
    if not num_bytes:
        return True
    # Memory that torch's allocator has cached does not count as free: the next forward and backward need it.
    return num_bytes <= torch.accelerator.get_memory_info()[0]


@functools.cache
def _warn_of_waits() -> None:
    distributed.warn_main(
        "training waits while the state is copied to the host, because the accelerator has no room for the copy that FSDP1 "
        "makes. Use an fsdp2 template."
    )
