"""Copies this rank's shards to host memory, reusing the same memory for every save.

Shards on an accelerator are copied into pinned memory on a separate stream, once the work that training has queued is done.
If each save allocated new memory, that memory would have to be pinned again or, unpinned, would cause page faults. Memory use
would also double, because the allocator does not reuse memory that another thread has freed.

torch's `DefaultStager` is not used: in torch 2.13 its stream does not wait for training's stream, its thread works on
device 0 on every rank, and it pins memory on CUDA only.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.checkpointing.state import local_tensors
from hf_fsdp_recipes.patches.torch import set_local_tensor

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1024**3
ALIGNMENT_BYTES = 512

KeyPath = tuple[str | int, ...]  # the keys that lead to a tensor in a nested state dict


class CopyStream:
    """A stream for copying a state to host memory during training, on the accelerator that holds the state.

    Create it on the training thread. If the state is in host memory, all methods do nothing.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        devices = (tensor.device for _, tensor in local_tensors(state))
        self._device = next((device for device in devices if device.type != "cpu"), None)
        self._stream = None if self._device is None else torch.Stream(self._device)
        self._last_copy: torch.Event | None = None

    def wait_for_training(self) -> None:
        """Make later copies wait for the work that training has queued. Call it on the training thread; does not block."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def hold_training(self) -> None:
        """Make work that training queues from now on wait for the copies. Call it on the training thread; does not block."""
        if self._last_copy is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._last_copy)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this stream and its device current in the calling thread.

        Otherwise a new thread would use device 0 and the default stream, on which training runs.
        """
        with contextlib.nullcontext() if self._stream is None else self._stream:
            yield

    def record_copies(self) -> "torch.Event | None":
        """Return an event that is reached when the copies queued so far are done, or None if the state is in host memory."""
        if self._stream is not None:
            self._last_copy = self._stream.record_event()
        return self._last_copy

    def synchronize(self) -> None:
        """Block the calling thread until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class HostStaging:
    """Host memory for one state dict, whose structure and shapes stay the same from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[KeyPath, tuple[torch.Tensor, bool]] = {}  # (buffer, whether it is pinned)
        self._can_pin = True

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy `state` to host memory, over the previous copy, and return the copy.

        Copies from an accelerator are queued on the current stream and may still be running when this returns.
        """
        sizes = {True: 0, False: 0}
        for _, tensor in local_tensors(state):
            sizes[tensor.device.type != "cpu"] += _aligned(tensor.nbytes)
        memory = {is_pinned: _HostMemory(num_bytes, is_pinned) for is_pinned, num_bytes in sizes.items()}
        with torch.no_grad():
            return self._copy(dict(state), (), memory)

    def _copy(self, value: Any, path: KeyPath, memory: "dict[bool, _HostMemory]") -> Any:
        if isinstance(value, dict):
            return {key: self._copy(inner, (*path, key), memory) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(inner, (*path, number), memory) for number, inner in enumerate(value))
        if isinstance(value, DTensor):
            return set_local_tensor(value.detach(), self._copy_tensor(value.to_local(), path, memory))
        if hasattr(value, "local_shards"):
            return self._copy_sharded_tensor(value, path, memory)
        return self._copy_tensor(value, path, memory) if isinstance(value, torch.Tensor) else value

    def _copy_sharded_tensor(
        self, tensor: "ShardedTensor", path: KeyPath, memory: "dict[bool, _HostMemory]"
    ) -> "ShardedTensor":
        """Copy an FSDP1 tensor. Source: torch 2.13 `ShardedTensor.cpu`."""
        from torch.distributed._shard.sharded_tensor import Shard
        from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase

        metadata = copy.deepcopy(tensor.metadata())
        for part in metadata.shards_metadata:
            part.placement._device = torch.device("cpu")
        on_host = {tuple(part.shard_offsets): part for part in metadata.shards_metadata}
        shards = []
        for number, shard in enumerate(tensor.local_shards()):
            values = self._copy_tensor(shard.tensor, (*path, number), memory)
            shards.append(Shard(values, on_host[tuple(shard.metadata.shard_offsets)]))
        # ShardedTensor's own constructor communicates with other ranks and refuses pinned memory.
        return ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, metadata)

    def _copy_tensor(self, tensor: torch.Tensor, path: KeyPath, memory: "dict[bool, _HostMemory]") -> torch.Tensor:
        buffer, is_pinned = self._buffers.get(path, (None, False))
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer, is_pinned = self._buffers[path] = self._allocate(tensor, memory)
        return buffer.copy_(tensor.detach(), non_blocking=is_pinned)

    def _allocate(self, tensor: torch.Tensor, memory: "dict[bool, _HostMemory]") -> tuple[torch.Tensor, bool]:
        """Return host memory for a tensor, and whether this memory is pinned."""
        if tensor.device.type != "cpu" and self._can_pin:
            try:
                return memory[True].empty_like(tensor), True
            except RuntimeError as error:
                self._can_pin = False
                memory[False].expect(memory[True].num_expected_bytes)
                logger.warning("saving takes longer, because the host has too little memory to pin: %s", error)
        return memory[False].empty_like(tensor), False


class _HostMemory:
    """Divides large allocations among tensors.

    One pinned allocation per tensor would waste memory, because torch rounds each allocation up to a power of two bytes. A tensor
    that is larger than CHUNK_BYTES gets a separate allocation.
    """

    def __init__(self, num_expected_bytes: int, is_pinned: bool) -> None:
        self.num_expected_bytes = num_expected_bytes
        self._is_pinned = is_pinned
        self._free = memoryview(b"")

    def expect(self, num_bytes: int) -> None:
        """Add to the number of bytes that later calls of `empty_like` are expected to need; allocations are sized for it."""
        self.num_expected_bytes += num_bytes

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return uninitialized host memory of a tensor's shape and dtype; its storage is no larger than the tensor."""
        num_bytes = _aligned(tensor.nbytes)
        if num_bytes > len(self._free):
            size = max(num_bytes, min(CHUNK_BYTES, self.num_expected_bytes))
            self._free = memoryview(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned).numpy())
        part, self._free = self._free[: tensor.nbytes], self._free[num_bytes:]
        self.num_expected_bytes -= num_bytes
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.frombuffer(part, dtype=tensor.dtype).view(tensor.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
