"""Makes bitsandbytes' 32-bit optimizers work under FSDP2.

Each rank updates its own rows (dim 0) of a parameter. The optimizers' operators do not accept
DTensors. But to update an element, they need only this element and its states. The states become
DTensors sharded like the parameter, so that DCP can save and load the states.

Source: bitsandbytes 0.50 `optim/optimizer.py`. Its methods get one parameter `p` and keep the state
of `p` in `self.state[p]`.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes.upstream.patches import is_fsdp_requested
from hf_fsdp_recipes.upstream.torch_internals import set_local_tensor
from hf_fsdp_recipes.weights.rows import local_part

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Optimizers of torch that update elements separately.
SHARDABLE = (
    "adamw_torch_fused",
    "adamw_torch",
    "sgd",
    "rmsprop",
)
BITSANDBYTES = (
    "paged_adamw_32bit",
    "paged_lion_32bit",
    "lion_32bit",
    "rmsprop_bnb_32bit",
)


def sharded_optimizer(
    args: "TrainingArguments",
) -> "tuple[type[torch.optim.Optimizer], dict[str, Any]] | None":
    """Make bitsandbytes' optimizers, such as `optim: paged_adamw_32bit`, work under FSDP2.

    Otherwise their first step fails. Pass the result to any Trainer:
    `SFTTrainer(..., args=args, optimizer_cls_and_kwargs=sharded_optimizer(args))`. Checkpoints
    include the optimizer's state.

    Returns:
        A value for Trainer's `optimizer_cls_and_kwargs`. None without FSDP, or if `args.optim` is
        not in `BITSANDBYTES`: Trainer then creates the optimizer itself.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    if not is_fsdp_requested() or args.optim not in BITSANDBYTES:
        return None
    from transformers import Trainer

    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    return type(f"Sharded{optimizer_class.__name__}", (_LocalStep, optimizer_class), {}), kwargs


class _LocalStep:
    """Mixin for bitsandbytes optimizers.

    It passes this rank's local tensors to the optimizer instead of DTensors.
    """

    # The optimizer defines these three attributes.
    state: Any
    is_paged: bool
    get_state_buffer: Any

    def init_state(self, group: object, p: Tensor, *indices: int) -> None:
        shard = local_part(p)
        super().init_state(group, shard, *indices)  # type: ignore[misc]
        state = self.state.pop(shard)
        for name, value in state.items():
            if name.startswith("state"):  # as large as the parameter
                state[name] = to_sharded(value, p)
        self.state[p] = state

    def prefetch_state(self, p: object) -> None:
        """Do nothing. `update_step` prefetches the local tensors."""

    def update_step(self, group: object, p: Tensor, *indices: int) -> None:
        state = self.state[p]
        shard = local_part(p).detach()  # so that its gradient is freed
        if not shard.numel():
            state["step"] += 1
            return
        shard.grad = local_part(p.grad)
        self.state[shard] = {name: local_part(value) for name, value in state.items()}
        super().prefetch_state(shard)  # type: ignore[misc]
        super().update_step(group, shard, *indices)  # type: ignore[misc]
        state["step"] = self.state.pop(shard)["step"]

    def load_state_dict(self, state_dict: dict, move_to_device: bool = True) -> None:
        """Load the optimizer's state. If this is a paged optimizer, move it to paged memory."""
        super().load_state_dict(state_dict, move_to_device)  # type: ignore[misc]
        if not self.is_paged:
            return
        for p, state in self.state.items():
            for name, value in state.items():
                if isinstance(value, DTensor):
                    buffer = self.get_state_buffer(local_part(p), dtype=value.dtype)
                    buffer.copy_(local_part(value))
                    state[name] = to_sharded(buffer, p)


@torch.no_grad()  # which makes `to_local` fast
def to_sharded(values: Tensor, p: Tensor) -> Tensor:
    """Return this rank's rows of a state as a DTensor if the parameter is one, sharded like it."""
    sharded = torch.empty_like(p, dtype=values.dtype)
    if not isinstance(sharded, DTensor):
        return values
    set_local_tensor(sharded, values)
    # bitsandbytes marks its own tensors like this, and does not move marked ones to the device.
    sharded.is_paged = getattr(values, "is_paged", False)  # type: ignore[attr-defined]
    return sharded
