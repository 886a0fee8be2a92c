"""Makes bitsandbytes' optimizers work under FSDP2: each rank updates its own rows.

The optimizers' operators do not accept DTensors ("does not have a sharding strategy registered"), but updating an element needs
only that element or, for 8-bit states, its block of 256 elements. The states become DTensors sharded like their parameter, so that
DCP can save and load them. The blocks of 8-bit states start at each rank's first row, so a run with such states can resume only on
the same number of ranks.

Source: bitsandbytes 0.50 `optim/optimizer.py`: `init_state`, `update_step` and `prefetch_state` receive one parameter
and keep its state in `self.state[p]`.
"""

import inspect
import math
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.patches.registry import versions_of
from hf_fsdp_recipes.patches.torch import set_local_tensor

BLOCK_ELEMENTS = 256  # elements that share one scale of an 8-bit state
STEP_PARAMETERS = ["self", "group", "p", "gindex", "pindex"]


def shard_optimizer_class(optimizer_class: type) -> type:
    """Return a subclass of a bitsandbytes optimizer that also supports DTensors.

    Raises a RecipeError if the optimizer's methods have other parameters than in the supported versions.
    """
    for name in ("init_state", "update_step"):
        found = list(inspect.signature(getattr(optimizer_class, name, int)).parameters)
        if found != STEP_PARAMETERS:
            raise RecipeError(
                f"bitsandbytes {version('bitsandbytes')} is not supported: {name} takes {found} instead of "
                f"{STEP_PARAMETERS}. Install {versions_of('bitsandbytes')}, or use optim: adamw_torch_fused."
            )
    # Trainer keeps embedding states in 32 bits if the class's full name contains "bitsandbytes", as this module's name does.
    return type(f"Sharded{optimizer_class.__name__}", (_LocalStep, optimizer_class), {"__module__": __name__})


class _LocalStep:
    """Mixin that passes this rank's local tensors, instead of DTensors, to a bitsandbytes optimizer."""

    state: dict[torch.Tensor, dict[str, Any]]  # the optimizer defines these three attributes
    is_paged: bool
    get_state_buffer: Callable[..., torch.Tensor]

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        if not isinstance(p, DTensor):
            return super().init_state(group, p, gindex, pindex)  # type: ignore[misc]
        # Use the largest shard's size on every rank, so that all ranks choose the same dtype and number of blocks.
        largest = _largest_shard(p)
        super().init_state(group, largest, gindex, pindex)  # type: ignore[misc]
        state = self.state.pop(largest)
        self.state[p] = {name: _to_sharded(name, value, p) for name, value in state.items()}

    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        if not isinstance(p, DTensor):
            return super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
        state = self.state[p]
        shard = p.to_local().detach()
        if not shard.numel():
            state["step"] += 1
            return
        shard.grad = p.grad.to_local()
        self.state[shard] = {name: _to_local(name, value, shard) for name, value in state.items()}
        super().update_step(group, shard, gindex, pindex)  # type: ignore[misc]
        state["step"] = self.state.pop(shard)["step"]

    def prefetch_state(self, p: torch.Tensor) -> None:
        if not isinstance(p, DTensor):
            return super().prefetch_state(p)  # type: ignore[misc]
        from bitsandbytes.functional import prefetch_tensor

        for value in self.state[p].values():
            if getattr(value, "is_paged", False):
                prefetch_tensor(value.to_local())

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load the state of the optimizer, and move it to paged memory if this is a paged optimizer."""
        super().load_state_dict(state_dict, move_to_device)  # type: ignore[misc]
        for p, state in self.state.items():
            if isinstance(p, DTensor) and self.is_paged:
                self._move_to_pages(p, state)

    def _move_to_pages(self, p: DTensor, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name.startswith("state") and isinstance(value, DTensor):
                buffer = self.get_state_buffer(p.to_local(), dtype=value.dtype)
                buffer.copy_(value.to_local())
                state[name] = _to_sharded(name, buffer, p)


def _largest_shard(p: DTensor) -> torch.Tensor:
    """Return this rank's shard or, if rank 0's shard is larger, an uninitialized tensor of that shard's shape."""
    shard = p.to_local().detach()
    if not p.ndim:
        return shard
    sizes = zip(p.device_mesh.shape, p.placements, strict=True)
    rows = -(-p.shape[0] // math.prod(size for size, placement in sizes if placement == Shard(0)))
    return shard if shard.shape[0] == rows else shard.new_empty((rows, *shard.shape[1:]))


def _to_sharded(name: str, value: Any, p: DTensor) -> Any:
    """Convert a state entry for a checkpoint; entries that differ between ranks become DTensors."""
    if name.startswith("state"):
        rows = p.to_local().shape[0] if p.ndim else 1
        local = value if not p.ndim or value.shape[0] == rows else value[:rows]
        sharded = set_local_tensor(torch.empty_like(p, dtype=local.dtype, requires_grad=False), local)
        if getattr(value, "is_paged", False):  # bitsandbytes reads both attributes
            local.is_paged, local.page_deviceid = True, value.page_deviceid
            sharded.is_paged = True
        return sharded
    if name.startswith("absmax"):  # the same length on every rank; the last ranks may use only part of it
        return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False)
    return value


def _to_local(name: str, value: Any, shard: torch.Tensor) -> Any:
    """Return a state entry for this rank's rows, as bitsandbytes expects it."""
    if not isinstance(value, DTensor):
        return value
    local = value.to_local()
    return local[: -(-shard.numel() // BLOCK_ELEMENTS)] if name.startswith("absmax") else local
