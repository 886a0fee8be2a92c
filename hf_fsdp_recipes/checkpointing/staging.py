"""Copies this rank's part of a sharded state to host memory, into the same memory each time.

New memory for each save would cost page faults, and more of it: other threads' allocations do not reuse what a thread frees.
torch's own `BlockingAsyncStager` copies each DTensor once more on the way, which took 80 % of the state on top.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.checkpointing.fsdp1 import ShardedTensorStaging
from hf_fsdp_recipes.patches.torch import set_local_tensor

Path = tuple[Any, ...]  # the keys that lead to a tensor


class HostStaging:
    """Host memory for one state dict, whose structure and shapes stay the same from save to save. No collectives."""

    def __init__(self) -> None:
        self._buffers: dict[Path, torch.Tensor] = {}
        self._sharded_tensors: dict[Path, ShardedTensorStaging] = {}

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy that training does not change; the copy before it is overwritten."""
        with torch.no_grad():
            return self._copy(dict(state), ())

    def _copy(self, value: Any, path: Path) -> Any:
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

    def _copy_tensor(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[path] = torch.empty_like(tensor, device="cpu", requires_grad=False)
        return buffer.copy_(tensor)
