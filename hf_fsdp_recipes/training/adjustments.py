"""Changes that SFTTrainer needs: gradient sums in float32, packed rows that are kept apart, and streams that resume."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from hf_fsdp_recipes.errors import RecipeError

if TYPE_CHECKING:
    from trl import SFTTrainer

LENGTH = 16  # tokens in each of two packed rows
TOLERANCE = 1e-2  # relative to the outputs' norm; if rows are kept apart, only rounding differs


def adjust(trainer: "SFTTrainer", is_streamed: bool) -> None:
    """Change a new trainer in place. Not a collective; every rank calls this before `trainer.train`."""
    if trainer.padding_free:
        trainer.add_callback(PackingCheck(trainer.data_collator))
    if is_streamed:  # endless, so that a resumed run can skip the rows that it has seen, also in a later pass
        trainer.train_dataset = trainer.train_dataset.repeat(None)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin and plugin.mixed_precision_policy:  # Accelerate's own would sum and accumulate gradients in 16 bits
        policy = dataclasses.replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
        plugin.mixed_precision_policy = policy
        gather_units_once(trainer.model)


def gather_units_once(model: torch.nn.Module) -> None:
    """Let a model gather each FSDP unit once before its first forward.

    With reduction in float32 and accumulated micro-batches, torch raises an error in the backward pass if a unit has never been
    gathered. For example, TRL's loss reads the weight of the head and does not call the head.
    """

    @torch.compiler.disable
    def gather(root: torch.nn.Module, inputs: Any) -> None:
        handle.remove()
        for unit in root.modules():
            if isinstance(unit, FSDPModule) and unit is not root:
                unit.unshard()
                unit.reshard()

    handle = model.register_forward_pre_hook(gather)  # FSDP2's own hook runs before it


class PackingCheck(TrainerCallback):
    """Refuses to train if the second of two packed rows depends on the first.

    It runs the loaded model twice on two short rows, with the attention that training uses. Transformers keeps packed rows
    apart by their position ids. OPT, gpt-oss with eager attention and Mamba, for example, ignore these without an error.

    Args:
        collate: the trainer's data collator, which packs rows.

    Raises:
        RecipeError: on every rank, when training starts.
    """

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pack the same row behind two different rows in turn, and compare its two outputs. Collective."""
        model = kwargs["model"].eval()
        last = torch.arange(LENGTH).tolist()
        outputs = []
        for first in (last, [token + 1 for token in last]):
            batch = self._collate([{"input_ids": row, "labels": row} for row in (first, last)])
            batch = {name: value.to(args.device) if hasattr(value, "to") else value for name, value in batch.items()}
            del batch["labels"]
            outputs.append(model(**batch, use_cache=False).logits[0, LENGTH:].float())
        if torch.dist(*outputs) > TOLERANCE * outputs[0].norm():
            attention = getattr(model.config, "_attn_implementation", None)
            raise RecipeError(
                f"packing: with attn_implementation {attention}, {type(model).__name__} lets packed rows see each other. Set "
                f"packing: false, or an attn_implementation that keeps them apart, such as flash_attention_2."
            )
