"""Copies this rank's part of a sharded state to host memory, into the same memory every time.

Fresh memory for each save would cost page faults, and more of it: what a thread frees, another thread's allocations do
not reuse. torch's own `BlockingAsyncStager` copies each DTensor once more on the way, which cost four fifths of the
state on top here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.patches import saving


class HostStaging:
    """The copy of one state dict, whose structure and shapes stay the same from save to save. No collectives."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        self._stagers: dict[tuple[Any, ...], Any] = {}

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict that the next steps of training do not change; the copy before it is overwritten."""
        with torch.no_grad():
            return self._copy(dict(state), ())

    def _copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(inner, (*path, number)) for number, inner in enumerate(value))
        if isinstance(value, DTensor):
            return saving.put_local(value.detach(), self._copy_plain(value.to_local(), path))
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return self._copy_plain(value, path)
        return self._copy_other(value, path) if isinstance(value, torch.Tensor) else value

    def _copy_plain(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[path] = torch.empty_like(tensor, device="cpu", requires_grad=False)
        return buffer.copy_(tensor)

    def _copy_other(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        """Copy a tensor of another class (FSDP1's ShardedTensor) as torch does."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        stager = self._stagers.get(path)
        if stager is not None:
            return stager.stage({"tensor": tensor})["tensor"]
        stager = self._stagers[path] = BlockingAsyncStager()
        stager.state_dict_cache = stager.stage({"tensor": tensor})
        stager.cache_staged_state_dict = True
        return stager.state_dict_cache["tensor"]
