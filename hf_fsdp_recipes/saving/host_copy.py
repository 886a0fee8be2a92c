"""Copies a rank's sharded state to host memory, to be written while training continues."""

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.metrics.memory import available_host_bytes
from hf_fsdp_recipes.weights.rows import local_part

logger = logging.getLogger(__name__)

PINNED_BYTES = 1024 * 1024  # smaller tensors gain nothing, and share their pages with other data
USED_SHARE = 0.95  # of the memory that is left
REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all CUDA contexts
PLAIN_CLASSES = (Tensor, torch.nn.Parameter)


class HostCopy:
    """A copy of a rank's state in host memory. Each save uses the memory of the save before it.

    Training waits for the copy, so nothing can change the state meanwhile. What is copied from a
    GPU of CUDA or ROCm goes to pinned memory, at the speed of the bus. If memory cannot be pinned,
    copies are slower.

    Args:
        num_ranks_on_node: how many ranks share this node's cores and memory.
    """

    def __init__(self, num_ranks_on_node: int) -> None:
        self._num_ranks_on_node = num_ranks_on_node
        self._can_pin = True
        self._forms: list[object] = []
        self._copies: list[Tensor] = []
        self._pinned: set[int] = set()  # addresses
        # Memory must not be freed while it is pinned. When the process ends, this is not needed.
        finalizer = weakref.finalize(self, unpin, self._pinned)
        finalizer.atexit = False

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a CheckpointError if a state cannot be copied. Not a collective.

        Every rank of the node calls this before any of them calls `take`, which allocates memory.
        """
        originals = find_tensors(state)
        if forms_of(originals) == self._forms:
            return
        for local in map(local_part, originals):
            if type(local) not in PLAIN_CLASSES or local.layout != torch.strided:
                raise CheckpointError(
                    f"the state has a {type(local).__name__}, which has no memory of its own"
                )
        needed_bytes = count_bytes(originals)
        # Other ranks need as much. What was allocated for another state is freed first.
        left_bytes = available_host_bytes() / self._num_ranks_on_node + count_bytes(self._copies)
        if needed_bytes > USED_SHARE * left_bytes:
            raise CheckpointError(
                f"a copy needs {needed_bytes / 1e9:.1f} GB of host memory, and "
                f"{left_bytes / 1e9:.1f} GB are left for each rank of this node"
            )

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a state. Not a collective.

        Args:
            state: nested dicts, lists and tuples of tensors on any device, DTensors among them, and
                of other values.

        Returns:
            The state with tensors in host memory, of the same dtypes, shapes and placements.
            Mappings become dicts. Other values are copied by `copy.deepcopy`.
        """
        originals = find_tensors(state)
        if forms_of(originals) != self._forms:
            self._allocate(originals)
        if any(tensor.device.type != "cpu" for tensor in originals):
            torch.accelerator.synchronize()  # other streams may still compute, in host memory too
        for original, memory in zip(originals, self._copies, strict=True):
            local_part(memory).copy_(local_part(original))
        copies = iter(self._copies)
        return map_tensors(state, lambda _: next(copies))

    def close(self) -> None:
        """Free the memory."""
        unpin(self._pinned)
        self._copies = []
        self._forms = []

    def _allocate(self, originals: list[Tensor]) -> None:
        self.close()
        self._copies = [torch.empty_like(tensor, device="cpu") for tensor in originals]
        num_cores = len(os.sched_getaffinity(0))
        # Let the kernel provide the new memory. Pinning would do this too, but with one thread,
        # which takes three times as long.
        num_threads = max(1, num_cores // self._num_ranks_on_node)
        with ThreadPoolExecutor(num_threads, "checkpoint-memory") as threads:
            threads.map(Tensor.zero_, map(local_part, self._copies))
        for original, memory in zip(originals, self._copies, strict=True):
            if original.device.type == "cuda" and self._can_pin:
                self._pin(local_part(memory), original.device)
        self._forms = forms_of(originals)

    def _pin(self, tensor: Tensor, device: torch.device) -> None:
        if tensor.nbytes < PINNED_BYTES:
            return
        address = tensor.data_ptr()
        cuda = torch.cuda.cudart()
        error = int(cuda.cudaHostRegister(address, tensor.nbytes, REGISTER_PORTABLE))
        if not error:
            self._pinned.add(address)
            return
        logger.warning(
            "host memory cannot be pinned (CUDA error %d), so saves copy more slowly",
            error,
        )
        self._can_pin = False
        # CUDA raises the error again in the next kernel, whatever that computes.
        with suppress(RuntimeError):
            torch.ones(1, device=device).mul_(2)


def find_tensors(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a state in its order. A tensor with two names is there twice."""
    found: list[Tensor] = []
    map_tensors(state, found.append)
    return found


def forms_of(tensors: Iterable[Tensor]) -> list[object]:
    """Return the tensors' forms: two states of the same forms can be copied to the same memory."""
    return [
        (tensor.shape, local_part(tensor).shape, tensor.dtype, getattr(tensor, "placements", None))
        for tensor in tensors
    ]


def unpin(addresses: set[int]) -> None:
    """Unpin memory and forget its addresses."""
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how large this rank's rows of tensors are."""
    return sum(local_part(tensor).nbytes for tensor in tensors)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with `function(tensor)` for each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, function) for item in value)
    return deepcopy(value)
