"""Makes bitsandbytes' optimizers work under FSDP2: each rank updates its own rows (dim 0) of a parameter.

The optimizers' operators do not accept DTensors. But to update an element, they need only this element or, for 8-bit states,
its block of 256 elements. The states become DTensors sharded like the parameter, so that DCP can save and load the states.

Source: bitsandbytes 0.50 `optim/optimizer.py`. Its methods get one parameter `p` and keep the state of `p` in `self.state[p]`.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from transformers import TrainingArguments

SHARDABLE = ("adamw_torch_fused", "adamw_torch", "sgd", "rmsprop")  # from torch; they update elements separately
BLOCK_ELEMENTS = 256  # elements that share one scale of an 8-bit state


def optimizer_name(args: "TrainingArguments") -> str:
    """Return the optimizer's name as a string. `args.optim` may be an enum."""
    return str(getattr(args.optim, "value", args.optim))


def is_bitsandbytes_optimizer(name: str) -> bool:
    """Return whether this is a shardable optimizer of bitsandbytes. AdEMAMix is not, as it keeps two averages in one tensor."""
    names = ("adamw_8bit", "adamw_bnb_8bit")
    return name in names or (name.startswith(("paged_", "lion_", "rmsprop_bnb")) and "ademamix" not in name)


def sharded_optimizer(args: "TrainingArguments") -> "tuple[type[torch.optim.Optimizer], dict[str, Any]] | None":
    """Make bitsandbytes' optimizers, such as `optim: adamw_8bit`, work under FSDP2. Otherwise they fail in the first step.

    Pass the result to any Trainer: `SFTTrainer(..., args=args, optimizer_cls_and_kwargs=sharded_optimizer(args))`. Checkpoints
    include the optimizer's state. 8-bit states resume only on the same number of ranks, because each rank has its own blocks.

    Returns:
        A value for Trainer's `optimizer_cls_and_kwargs`, or None if `is_bitsandbytes_optimizer` is false.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    if not is_bitsandbytes_optimizer(optimizer_name(args)):
        return None
    from transformers import Trainer

    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    # Trainer keeps the states of embeddings in 32 bits if the full name of the class contains "bitsandbytes".
    namespace = {"__module__": f"{__name__}.bitsandbytes"}
    return type(f"Sharded{optimizer_class.__name__}", (_LocalStep, optimizer_class), namespace), kwargs


class _LocalStep:
    """Mixin for bitsandbytes optimizers. It passes this rank's local tensors to the optimizer instead of DTensors."""

    state: dict[torch.Tensor, dict[str, Any]]  # the optimizer defines these three attributes
    is_paged: bool
    get_state_buffer: Callable[..., torch.Tensor]

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        if not isinstance(p, DTensor):
            return super().init_state(group, p, gindex, pindex)  # type: ignore[misc]
        # Every rank uses the size of the largest shard, so that all ranks choose the same state dtype and number of blocks.
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
        """Load the optimizer's state. If this is a paged optimizer, move the state to paged memory."""
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
    """Return this rank's shard. If rank 0's shard is larger, return an uninitialized tensor of that larger shape instead."""
    shard = p.to_local().detach()
    if not p.ndim:
        return shard
    sizes = zip(p.device_mesh.shape, p.placements, strict=True)
    rows = -(-p.shape[0] // math.prod(size for size, placement in sizes if placement == Shard(0)))
    return shard if shard.shape[0] == rows else shard.new_empty((rows, *shard.shape[1:]))


def _to_sharded(name: str, value: Any, p: DTensor) -> Any:
    """Convert a state entry to the form that checkpoints need. Entries that differ between ranks become DTensors."""
    if name.startswith("state"):
        rows = p.to_local().shape[0] if p.ndim else 1
        local = value if not p.ndim or value.shape[0] == rows else value[:rows]
        sharded = torch.empty_like(p, dtype=local.dtype, requires_grad=False)
        sharded._local_tensor = local  # `from_local` needs the mesh's device, but paged memory counts as CPU memory
        if getattr(value, "is_paged", False):  # bitsandbytes reads both attributes
            local.is_paged, local.page_deviceid = True, value.page_deviceid
            sharded.is_paged = True
        return sharded
    if name.startswith("absmax"):  # has the same length on every rank, but the last ranks may use only a part
        return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False)
    return value


def _to_local(name: str, value: Any, shard: torch.Tensor) -> Any:
    """Return this rank's part of a state entry, in the form that bitsandbytes expects."""
    if not isinstance(value, DTensor):
        return value
    local = value.to_local()
    return local[: -(-shard.numel() // BLOCK_ELEMENTS)] if name.startswith("absmax") else local
