"""Changes an SFTTrainer before training.

It then sums gradients in float32, refuses models that mix packed rows, and lets streamed runs
resume.
"""

import dataclasses
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import IterableDataset
from torch.distributed.fsdp import FSDPModule
from transformers import DataCollator, TrainerCallback, TrainingArguments
from trl import SFTTrainer

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.upstream.transformers_internals import ATTENTION

LENGTH = 16  # tokens in each of the two rows that are packed for the check
TOLERANCE = 1e-2  # largest difference, relative to the outputs' norm, that counts as rounding


def adjust(trainer: SFTTrainer, is_streamed: bool) -> None:
    """Change a new trainer in place. Every rank calls this before `trainer.train`.

    Not a collective.
    """
    if trainer.padding_free:
        trainer.add_callback(PackingCheck(trainer.data_collator))
    if is_streamed:
        assert isinstance(trainer.train_dataset, IterableDataset)
        # An endless stream lets a resumed run skip the rows it has seen, even in a later pass.
        trainer.train_dataset = trainer.train_dataset.repeat(None)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin and plugin.mixed_precision_policy:
        # The policy's own reduce_dtype would sum gradients in 16 bits.
        plugin.mixed_precision_policy = dataclasses.replace(
            plugin.mixed_precision_policy,
            reduce_dtype=torch.float32,
        )
        assert trainer.model is not None
        gather_units_once(trainer.model)


def gather_units_once(model: torch.nn.Module) -> None:
    """Let a model gather each of its FSDP units once before the first forward.

    If gradients are reduced in float32 and accumulated over micro-batches, torch raises an error
    in the backward pass of a unit that has never been gathered. The output head can be such a
    unit: TRL's loss reads its weight without calling the head.
    """

    @torch.compiler.disable
    def gather(root: torch.nn.Module, inputs: object) -> None:
        handle.remove()
        for unit in root.modules():
            if isinstance(unit, FSDPModule) and unit is not root:
                unit.unshard()
                unit.reshard()

    handle = model.register_forward_pre_hook(gather)  # runs after FSDP2's own hook


class PackingCheck(TrainerCallback):
    """Refuses to train if the model's output for a packed row depends on the row before it.

    The check runs the loaded model twice on two short rows, with the attention that training uses.
    Transformers keeps packed rows apart by their position ids. Some models silently ignore these
    ids, like OPT, Mamba, and gpt-oss with eager attention.

    Args:
        collate: the trainer's data collator, which packs rows.

    Raises:
        RecipeError: on every rank, if packed rows are not kept apart when training starts.
    """

    def __init__(self, collate: DataCollator) -> None:
        self._collate = collate

    @torch.no_grad()
    def on_train_begin(self, args: TrainingArguments, *_: object, **kwargs: Any) -> None:
        """Pack the same row first behind one row and then behind another.

        Compare its outputs in both packs. Collective.
        """
        model = kwargs["model"].eval()
        row = list(range(LENGTH))
        other_row = list(range(1, LENGTH + 1))
        outputs = []
        for first in (row, other_row):
            batch = self._collate([{"input_ids": ids, "labels": ids} for ids in (first, row)])
            del batch["labels"]
            batch = send_to_device(batch, args.device)
            outputs.append(model(**batch, use_cache=False).logits[0, LENGTH:].float())
        if torch.dist(*outputs) > TOLERANCE * outputs[0].norm():
            attention = getattr(model.config, ATTENTION, None)
            raise RecipeError(
                f"packing: with attn_implementation {attention}, {type(model).__name__} lets packed"
                " rows see each other. Set packing: false, or an attn_implementation that keeps "
                "them apart, such as flash_attention_2."
            )
