"""bitsandbytes' optimizers under FSDP2: each rank steps the rows that it holds.

Their operators take no DTensor, and need none: an update looks at one element, or at a block of 256 of them. The
states that they make for a rank's rows become DTensors, cut like the parameter, so that torch DCP saves and loads
them. Paged states stay paged, also after a resume. The blocks of 8-bit states belong to a rank's rows: they are
resumed on the same number of ranks only (`save/resume.py` refuses the rest).

    Trainer(..., optimizer_cls_and_kwargs=sharded_optimizer(training_arguments))

Source: bitsandbytes 0.50 `optim/optimizer.py`: `init_state`, `update_step` and `prefetch_state` get a parameter and
keep its state under it in `self.state`.
"""

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.patches.torch import set_local_tensor

BLOCK_ELEMENTS = 256  # what one scale of an 8-bit state covers


def sharded_optimizer(training_arguments: Any) -> tuple[type, dict[str, Any]]:
    """Return what Trainer takes as `optimizer_cls_and_kwargs`, for an `optim` of bitsandbytes. Any rank; no collective.

    Args:
        training_arguments: with `optim`, `learning_rate`, `adam_beta1` and so on.

    Raises:
        ImportError: bitsandbytes is not installed.
        RecipeError: it steps parameters differently now.
    """
    from transformers import Trainer

    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(training_arguments)
    for name in ("init_state", "update_step"):
        found = list(inspect.signature(getattr(optimizer_class, name, int)).parameters)
        if found != ["self", "group", "p", "gindex", "pindex"]:
            raise RecipeError(
                f"bitsandbytes {version('bitsandbytes')}: {name} takes {found}. Rule: tried with 0.50, which steps one "
                f"parameter at a time. Remedy: install that, or optim: adamw_torch_fused."
            )
    # Trainer knows bitsandbytes' classes by the name of their module, and keeps embeddings in 32 bits then.
    return type(f"Sharded{optimizer_class.__name__}", (_OnShards, optimizer_class), {"__module__": __name__}), settings


class _OnShards:
    """Stands before one of bitsandbytes' classes and hands it local tensors; other parameters pass through."""

    state: dict[torch.Tensor, dict[str, Any]]  # these three are the other class's
    is_paged: bool
    get_state_buffer: Callable[..., torch.Tensor]

    def init_state(self, group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
        if not isinstance(p, DTensor):
            return super().init_state(group, p, gindex, pindex)  # type: ignore[misc]
        # Of the largest shard's size on every rank, so that all choose the same dtype and number of blocks.
        largest = _largest_shard(p)
        super().init_state(group, largest, gindex, pindex)  # type: ignore[misc]
        made = self.state.pop(largest)
        self.state[p] = {name: _spread(name, value, p) for name, value in made.items()}

    def update_step(self, group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
        if not isinstance(p, DTensor):
            return super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
        state = self.state[p]
        shard = p.to_local().detach()
        if not shard.numel():
            state["step"] += 1
            return
        shard.grad = p.grad.to_local()
        self.state[shard] = {name: _own(name, value, shard) for name, value in state.items()}
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
        """Load the state as bitsandbytes does, into paged memory where that was asked for."""
        super().load_state_dict(state_dict, move_to_device)  # type: ignore[misc]
        for p, state in self.state.items():
            if isinstance(p, DTensor) and self.is_paged:
                self._move_to_pages(p, state)

    def _move_to_pages(self, p: DTensor, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name.startswith("state") and isinstance(value, DTensor):
                buffer = self.get_state_buffer(p.to_local(), dtype=value.dtype)
                buffer.copy_(value.to_local())
                state[name] = _spread(name, buffer, p)


def _num_shards(p: DTensor) -> int:
    cut = [size for size, placement in zip(p.device_mesh.shape, p.placements, strict=True) if placement == Shard(0)]
    return torch.Size(cut).numel()


def _largest_shard(p: DTensor) -> torch.Tensor:
    """Return a tensor of the shape of the first rank's shard, which is this rank's own where rows divide evenly."""
    shard = p.to_local().detach()
    rows = -(-p.shape[0] // _num_shards(p)) if p.ndim else 1
    return shard if not p.ndim or shard.shape[0] == rows else shard.new_empty((rows, *shard.shape[1:]))


def _spread(name: str, value: Any, p: DTensor) -> Any:
    """Return one entry of a shard's state as it is kept: what differs from rank to rank as a DTensor."""
    if name.startswith("state"):
        rows = p.to_local().shape[0] if p.ndim else 1
        own = value if not p.ndim or value.shape[0] == rows else value[:rows]
        spread = set_local_tensor(torch.empty_like(p, dtype=own.dtype, requires_grad=False), own)
        if getattr(value, "is_paged", False):  # bitsandbytes looks for both
            own.is_paged, own.page_deviceid = True, value.page_deviceid
            spread.is_paged = True
        return spread
    if name.startswith("absmax"):  # as many on every rank; the last ranks may use fewer
        return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False)
    return value


def _own(name: str, value: Any, shard: torch.Tensor) -> Any:
    """Return an entry of the state as bitsandbytes expects it for this rank's rows."""
    if not isinstance(value, DTensor):
        return value
    own = value.to_local()
    return own[: -(-shard.numel() // BLOCK_ELEMENTS)] if name.startswith("absmax") else own
