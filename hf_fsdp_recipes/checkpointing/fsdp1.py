"""FSDP1-specific parts of checkpointing."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.checkpoint.staging import BlockingAsyncStager


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plugin: "FullyShardedDataParallelPlugin"
) -> dict[str, dict[str, Any]]:
    """Return the sharded state of model and optimizer under FSDP1. Collective: every rank must call this."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    with FSDP.state_dict_type(model, plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config):
        model_state = fsdp_utils._get_model_state_dict(model, adapter_only=True)
        return {"model": model_state, "optimizer": FSDP.optim_state_dict(model, optimizer)}


class ShardedTensorStaging:
    """Copies one ShardedTensor to host memory, reusing the same buffer."""

    def __init__(self) -> None:
        self._stager: BlockingAsyncStager | None = None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory. Overwrites the previous copy."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if self._stager is not None:
            return self._stager.stage({"tensor": tensor})["tensor"]
        self._stager = BlockingAsyncStager()
        self._stager.state_dict_cache = self._stager.stage({"tensor": tensor})
        self._stager.cache_staged_state_dict = True
        return self._stager.state_dict_cache["tensor"]
