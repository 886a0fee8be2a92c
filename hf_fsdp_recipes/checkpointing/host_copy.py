"""Copies a rank's sharded state to host memory, from which it is written while training continues."""

import contextlib
import copy
import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.metrics.memory import available_host_bytes

logger = logging.getLogger(__name__)

TOUCHED_BYTES = 64 * 1024 * 1024  # what a thread touches at a time
PINNED_BYTES = 1024 * 1024  # smaller tensors gain nothing, and share their pages with other data
USED_SHARE = 0.95  # of the memory that is left
REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all CUDA contexts
PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)

TensorPath: TypeAlias = tuple[
    Any, ...
]  # the keys and indices that lead to a tensor in a nested state
Layout: TypeAlias = dict[TensorPath, tuple[Any, ...]]  # forms of tensors, by path


class HostCopy:
    """A copy of a rank's state in host memory. Each save uses the memory of the save before it.

    Training waits for the copy, so nothing can change the state meanwhile. What is copied from a GPU
    of CUDA or ROCm goes to pinned memory, at the speed of the bus. If memory cannot be pinned, copies
    are slower.

    Args:
        num_ranks_on_node: how many ranks share this node's cores and memory.
    """

    def __init__(self, num_ranks_on_node: int) -> None:
        self._num_ranks_on_node = num_ranks_on_node
        self._can_pin = True
        self._layout: Layout = {}
        self._copies: dict[TensorPath, torch.Tensor] = {}
        self._pinned: set[int] = set()  # addresses
        # Memory must not be freed while it is pinned. When the process ends, this is not needed.
        self._unpin = weakref.finalize(self, unpin, self._pinned)
        self._unpin.atexit = False

    def find_obstacle(self, originals: "Originals") -> str | None:
        """Return why a state cannot be copied, or None. Not a collective.

        Every rank of the node calls this before any of them calls `take`, which allocates memory.
        """
        for path, local in originals.local_parts.items():
            if type(local) not in PLAIN_CLASSES or local.layout != torch.strided:
                name = ".".join(map(str, path))
                return f"{name} is a {type(local).__name__}, which has no memory of its own"
        if originals.layout == self._layout:
            return None
        # Other ranks need as much. What was allocated for another state is freed first.
        own_bytes = sum(local_part(memory).nbytes for memory in self._copies.values())
        needed_bytes = originals.num_bytes * self._num_ranks_on_node
        left_bytes = available_host_bytes() + own_bytes * self._num_ranks_on_node
        if needed_bytes <= USED_SHARE * left_bytes:
            return None
        return (
            f"the copies of this node's ranks need {needed_bytes / 1e9:.1f} GB of host memory, and "
            f"{left_bytes / 1e9:.1f} GB are available"
        )

    @torch.no_grad()
    def take(self, originals: "Originals") -> dict[str, Any]:
        """Return a copy of a state. Not a collective.

        Its tensors are in host memory, with the same dtypes, shapes and placements. A tensor with two
        names is copied once. What is no tensor, dict, list or tuple is copied by `copy.deepcopy`.
        """
        if originals.layout != self._layout:
            self._allocate(originals)
        originals.synchronize()  # what another stream still computes, in host memory too
        try:
            for path, local in originals.local_parts.items():
                memory = local_part(self._copies[path])
                is_pinned = memory.data_ptr() in self._pinned
                is_lazy = local.is_conj() or local.is_neg()  # then the host changes what was copied
                memory.copy_(local, non_blocking=is_pinned and not is_lazy)
        finally:
            originals.synchronize()  # before the memory can be read or freed
        return originals.replaced(self._copies)

    def close(self) -> None:
        """Free the memory."""
        unpin(self._pinned)
        self._copies.clear()
        self._layout = {}

    def _allocate(self, originals: "Originals") -> None:
        self.close()
        for path, original in originals.tensors.items():
            self._copies[path] = torch.empty_like(original, device="cpu")
        num_threads = max(1, len(os.sched_getaffinity(0)) // self._num_ranks_on_node)
        touch([local_part(memory) for memory in self._copies.values()], num_threads)
        for path, local in originals.local_parts.items():
            if local.device.type == "cuda" and self._can_pin:
                self._pin(local_part(self._copies[path]), local.device)
        self._layout = originals.layout

    def _pin(self, tensor: torch.Tensor, device: torch.device) -> None:
        if tensor.nbytes < PINNED_BYTES:
            return
        address = tensor.data_ptr()
        cuda = torch.cuda.cudart()
        error = int(cuda.cudaHostRegister(address, tensor.nbytes, REGISTER_PORTABLE))
        if not error:
            self._pinned.add(address)
            return
        logger.warning(
            "host memory cannot be pinned (CUDA error %d), so saves copy more slowly", error
        )
        self._can_pin = False
        # CUDA raises the error again in the next kernel, whatever that computes.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device).mul_(2)


class Originals:
    """The tensors of a state, without second names of a tensor.

    Args:
        state: nested dicts, lists and tuples of tensors on any device, DTensors among them, and of
            other values.

    Attributes:
        tensors: each tensor with the first path that leads to it.
        local_parts: this rank's rows of these tensors.
        layout: what tensors must have in common to be copied to the same memory.
        num_bytes: of this rank's rows.
        is_on_accelerator: whether a part of the state is on one.
    """

    @torch.no_grad()  # which makes `to_local` fast
    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._first_paths: dict[Any, TensorPath] = {}
        self.tensors: dict[TensorPath, torch.Tensor] = {}
        self.local_parts: dict[TensorPath, torch.Tensor] = {}
        self.layout: Layout = {}
        for path, tensor in find_tensors(state):
            if self._first_paths.setdefault(identify(tensor), path) == path:
                self.tensors[path] = tensor
                self.local_parts[path] = local_part(tensor)
                self.layout[path] = describe_form(tensor)
        self.num_bytes = sum(local.nbytes for local in self.local_parts.values())
        self.is_on_accelerator = any(
            local.device.type != "cpu" for local in self.local_parts.values()
        )

    def synchronize(self) -> None:
        """Wait for the accelerator, if the state is on one."""
        if self.is_on_accelerator:
            torch.accelerator.synchronize()

    def replaced(self, copies: Mapping[TensorPath, torch.Tensor]) -> dict[str, Any]:
        """Return a copy of the state with other tensors."""
        return map_tensors(self._state, lambda tensor: copies[self._first_paths[identify(tensor)]])


def unpin(addresses: set[int]) -> None:
    """Unpin memory and forget its addresses."""
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def touch(tensors: Sequence[torch.Tensor], num_threads: int) -> None:
    """Let the kernel provide the memory of new tensors, with several threads.

    Pinning would do this too, but with one thread, which takes three times as long.
    """
    pieces = [
        (tensor.data_ptr() + start, min(TOUCHED_BYTES, tensor.nbytes - start))
        for tensor in tensors
        for start in range(0, tensor.nbytes, TOUCHED_BYTES)
    ]
    with ThreadPoolExecutor(num_threads, "checkpoint-memory") as threads:
        for address, num_bytes in pieces:
            threads.submit(ctypes.memset, address, 0, num_bytes)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor, or the tensor itself, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def describe_form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors must have in common to be copied to the same memory."""
    placements = getattr(tensor, "placements", None)  # of a DTensor
    return tensor.shape, local_part(tensor).shape, tensor.dtype, placements


def identify(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two names of one tensor and differs between tensors that have memory."""
    local = local_part(tensor)
    view = (local.device, local.data_ptr(), local.stride(), local.is_conj(), local.is_neg())
    return *describe_form(tensor), *view


def find_tensors(value: Any, path: TensorPath = ()) -> Iterator[tuple[TensorPath, torch.Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_tensors(item, (*path, key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from find_tensors(item, (*path, index))


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with `function(tensor)` for each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, function) for item in value)
    return copy.deepcopy(value)
