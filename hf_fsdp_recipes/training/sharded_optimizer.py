"""Makes bitsandbytes' 32-bit optimizers work under FSDP2: each rank updates its own rows (dim 0) of a parameter.

The optimizers' operators do not accept DTensors. But to update an element, they need only this element and its states. The
states become DTensors sharded like the parameter, so that DCP can save and load the states.

Source: bitsandbytes 0.50 `optim/optimizer.py`. Its methods get one parameter `p` and keep the state of `p` in `self.state[p]`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.upstream.torch_internals import set_local_tensor

if TYPE_CHECKING:
    from transformers import TrainingArguments

SHARDABLE = (
    "adamw_torch_fused",
    "adamw_torch",
    "sgd",
    "rmsprop",
)  # from torch; they update elements separately
BITSANDBYTES = ("paged_adamw_32bit", "paged_lion_32bit", "lion_32bit", "rmsprop_bnb_32bit")


def optimizer_name(args: "TrainingArguments") -> str:
    """Return the optimizer's name as a string. `args.optim` may be an enum."""
    return str(getattr(args.optim, "value", args.optim))


def sharded_optimizer(
    args: "TrainingArguments",
) -> "tuple[type[torch.optim.Optimizer], dict[str, Any]] | None":
    """Make bitsandbytes' optimizers, such as `optim: paged_adamw_32bit`, work under FSDP2. Otherwise their first step fails.

    Pass the result to any Trainer: `SFTTrainer(..., args=args, optimizer_cls_and_kwargs=sharded_optimizer(args))`. Checkpoints
    include the optimizer's state.

    Returns:
        A value for Trainer's `optimizer_cls_and_kwargs`, or None if `args.optim` is not in `BITSANDBYTES`.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    if optimizer_name(args) not in BITSANDBYTES:
        return None
    from transformers import Trainer

    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    return type(f"Sharded{optimizer_class.__name__}", (_LocalStep, optimizer_class), {}), kwargs


class _LocalStep:
    """Mixin for bitsandbytes optimizers. It passes this rank's local tensors to the optimizer instead of DTensors."""

    state: dict[torch.Tensor, dict[str, Any]]  # the optimizer defines these three attributes
    is_paged: bool
    get_state_buffer: Callable[..., torch.Tensor]

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        if not isinstance(p, DTensor):
            return super().init_state(group, p, gindex, pindex)  # type: ignore[misc]
        shard = p.to_local().detach()
        super().init_state(group, shard, gindex, pindex)  # type: ignore[misc]
        self.state[p] = {
            name: _to_sharded(name, value, p) for name, value in self.state.pop(shard).items()
        }

    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        if not isinstance(p, DTensor):
            return super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
        state, shard = self.state[p], p.to_local().detach()
        if not shard.numel():
            state["step"] += 1
            return
        shard.grad = p.grad.to_local()
        self.state[shard] = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in state.items()
        }
        super().update_step(group, shard, gindex, pindex)  # type: ignore[misc]
        state["step"] = self.state.pop(shard)["step"]

    def prefetch_state(self, p: torch.Tensor) -> None:
        if not isinstance(p, DTensor):
            return super().prefetch_state(p)  # type: ignore[misc]
        from hf_fsdp_recipes.upstream.bitsandbytes_internals import prefetch_tensor

        for value in self.state[p].values():
            if getattr(value, "is_paged", False):
                prefetch_tensor(value.to_local())

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load the optimizer's state. If this is a paged optimizer, move the state to paged memory."""
        super().load_state_dict(state_dict, move_to_device)  # type: ignore[misc]
        sharded = [
            (p, state)
            for p, state in self.state.items()
            if self.is_paged and isinstance(p, DTensor)
        ]
        for p, state in sharded:
            for name, value in state.items():
                if isinstance(value, DTensor):
                    buffer = self.get_state_buffer(p.to_local(), dtype=value.dtype)
                    state[name] = _to_sharded(name, buffer.copy_(value.to_local()), p)


def _to_sharded(name: str, value: Any, p: DTensor) -> Any:
    """Return a state that is as large as the parameter as a DTensor, and any other entry as it is."""
    if not name.startswith("state"):
        return value
    sharded = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
    set_local_tensor(sharded, value)
    sharded.is_paged = getattr(
        value, "is_paged", False
    )  # then bitsandbytes does not move it to the device
    return sharded
