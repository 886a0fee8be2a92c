"""Copies this rank's shards to host memory, reusing the same buffers for every save.

New buffers for each save would cost page faults and extra memory, because the allocator does not reuse one thread's freed
memory in another. torch's `BlockingAsyncStager` makes an extra copy of each DTensor: another 80 % of the state's size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.checkpointing.fsdp1 import ShardedTensorStaging
from hf_fsdp_recipes.patches.torch import set_local_tensor

KeyPath = tuple[Any, ...]  # the keys that lead to a tensor


class HostStaging:
    """Host memory for one state dict, whose structure and shapes stay the same from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[KeyPath, torch.Tensor] = {}
        self._sharded_tensors: dict[KeyPath, ShardedTensorStaging] = {}

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy in host memory. Overwrites the previous copy."""
        with torch.no_grad():
            return self._copy(dict(state), ())

    def _copy(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(inner, (*path, number)) for number, inner in enumerate(value))
        if isinstance(value, DTensor):
            return set_local_tensor(value.detach(), self._copy_tensor(value.to_local(), path))
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return self._copy_tensor(value, path)
        if isinstance(value, torch.Tensor):
            return self._sharded_tensors.setdefault(path, ShardedTensorStaging()).copy(value)
        return value

    def _copy_tensor(self, tensor: torch.Tensor, path: KeyPath) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[path] = torch.empty_like(tensor, device="cpu", requires_grad=False)
        return buffer.copy_(tensor)
