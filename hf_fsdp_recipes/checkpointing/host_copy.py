"""Copies a rank's sharded state to host memory, from which it is written while training continues."""

import contextlib
import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.errors import describe

logger = logging.getLogger(__name__)

TOUCHED_BYTES = 64 * 1024 * 1024  # what a thread touches at a time
REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all CUDA contexts

TensorPath: TypeAlias = tuple[Any, ...]  # the keys and indices that lead to a tensor in a nested state


class HostCopy:
    """A copy of a rank's state in host memory. Each save uses the memory of the save before it.

    Training waits for the copy, so nothing can change the state meanwhile. For a GPU of CUDA or ROCm
    the memory is pinned, so that the copy runs at the speed of the bus. If memory cannot be pinned,
    copies are slower. If there is no memory, there is no copy, and the caller has to wait until the
    state is written.

    Args:
        device: the device of the state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._can_pin = device.type == "cuda"
        self._copies: dict[TensorPath, torch.Tensor] = {}
        self._pinned: list[int] = []  # addresses
        # Memory must not be freed while it is pinned. When the process ends, this is not needed.
        self._unpin = weakref.finalize(self, unpin, self._pinned)
        self._unpin.atexit = False

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a copy of the state, or None if there is not enough host memory. Not a collective.

        Args:
            state: nested dicts and lists of tensors on any device, DTensors among them, and of other
                values. Tensors of the copy are in host memory, with the same dtypes, shapes and
                placements. A tensor with two names is copied once. Other values are not copied.
        """
        first_paths: dict[Any, TensorPath] = {}
        originals: dict[TensorPath, torch.Tensor] = {}

        def note(path: TensorPath, tensor: torch.Tensor) -> None:
            if first_paths.setdefault(identify(tensor), path) == path:
                originals[path] = tensor

        map_tensors(state, note)
        try:
            self._allocate(originals)
        except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError
            message = "there is no host memory for a copy, so training waits for each save: %s"
            logger.warning(message, describe(error))
            self.close()
            return None
        for path, original in originals.items():
            copy = local_part(self._copies[path])
            copy.copy_(local_part(original), non_blocking=self._can_pin)
        if self._can_pin:
            torch.accelerator.current_stream().synchronize()
        return map_tensors(state, lambda _, tensor: self._copies[first_paths[identify(tensor)]])

    def close(self) -> None:
        """Free the memory."""
        unpin(self._pinned)
        self._copies.clear()

    def _allocate(self, originals: Mapping[TensorPath, torch.Tensor]) -> None:
        """Allocate and pin memory for tensors like these, unless they are those of the last save."""
        if describe_layout(originals) == describe_layout(self._copies):
            return
        self.close()
        for path, original in originals.items():
            self._copies[path] = torch.empty_like(original, device="cpu")
        allocated = [local_part(copy) for copy in self._copies.values()]
        touch(allocated)
        for tensor in allocated:
            self._pin(tensor)

    def _pin(self, tensor: torch.Tensor) -> None:
        if not self._can_pin or not tensor.numel():
            return
        address = tensor.data_ptr()
        cuda = torch.cuda.cudart()
        error = int(cuda.cudaHostRegister(address, tensor.nbytes, REGISTER_PORTABLE))
        if not error:
            self._pinned.append(address)
            return
        message = "host memory cannot be pinned (CUDA error %d), so saves take longer to copy"
        logger.warning(message, error)
        self._can_pin = False
        # CUDA raises the error again in the next kernel, whatever that computes.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device).mul_(2)


def unpin(addresses: list[int]) -> None:
    """Unpin memory and forget its addresses."""
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Let the kernel provide the memory of new tensors, with all of this rank's cores.

    Pinning would do this too, but on one core, which takes three times as long.
    """
    pieces = [
        (tensor.data_ptr() + start, min(TOUCHED_BYTES, tensor.nbytes - start))
        for tensor in tensors
        for start in range(0, tensor.nbytes, TOUCHED_BYTES)
    ]
    num_ranks_on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks_on_node)
    with ThreadPoolExecutor(num_threads, "checkpoint-memory") as threads:
        for address, num_bytes in pieces:
            threads.submit(ctypes.memset, address, 0, num_bytes)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor, or the tensor itself, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def identify(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for two names of one tensor, and for no other tensor."""
    return local_part(tensor).data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def describe_layout(tensors: Mapping[TensorPath, torch.Tensor]) -> dict[TensorPath, Any]:
    """Return what decides whether tensors fit into memory that was allocated for others."""
    return {path: (tensor.shape, local_part(tensor).shape, tensor.dtype) for path, tensor in tensors.items()}


def map_tensors(value: Any, function: Callable[[TensorPath, torch.Tensor], Any], path: TensorPath = ()) -> Any:
    """Return nested dicts, lists and tuples with `function(path, tensor)` for each tensor."""
    if isinstance(value, torch.Tensor):
        return function(path, value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = enumerate(value)
        return type(value)(map_tensors(item, function, (*path, index)) for index, item in items)
    return value
