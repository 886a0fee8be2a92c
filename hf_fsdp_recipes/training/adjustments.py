"""Changes an SFTTrainer before training.

It then sums gradients in float32, refuses models that mix packed rows or get another loss than
their own, and lets streamed runs resume.
"""

from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, TrainerCallback
from trl import SFTTrainer

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training.units import units_of
from hf_fsdp_recipes.upstream.transformers_internals import ATTENTION, metrics_of

ROW = list(range(16))  # tokens for the checks
TOLERANCE = 1e-2  # largest difference, relative to the outputs' norm, that counts as rounding
LOSS_TOLERANCE = 1e-3  # the same for a loss in float32


def adjust(trainer: SFTTrainer, is_streamed: bool) -> None:
    """Change a new trainer in place. Every rank calls this before `trainer.train`.

    Not a collective.
    """
    trainer.add_callback(ModelCheck(trainer))
    if is_streamed:
        # An endless stream lets a resumed run skip the rows it has seen, even in a later pass.
        trainer.train_dataset = trainer.train_dataset.repeat(None)  # type: ignore[union-attr]
    if trainer.is_fsdp_enabled:
        reduce_in_float32(trainer.accelerator.state.fsdp_plugin, trainer.model)


def reduce_in_float32(plugin: Any, model: Any) -> None:
    """Let FSDP sum gradients in float32. A mixed precision policy would sum them in 16 bits.

    If such gradients are accumulated over micro-batches, torch raises an error in the backward
    pass of a unit that has never been gathered. The output head can be such a unit: TRL's loss
    reads its weight without calling the head. So the model gathers each unit once before the
    first forward.
    """
    policy = plugin.mixed_precision_policy
    if not policy:
        return
    plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)

    @torch.compiler.disable
    def gather(root: torch.nn.Module, inputs: object) -> None:
        handle.remove()
        for unit in units_of(root)[1:]:
            unit.unshard()
            unit.reshard()

    handle = model.register_forward_pre_hook(gather)  # runs after FSDP2's own hook


class ModelCheck(TrainerCallback):
    """Refuses to train a model that would learn something else than its rows.

    The checks run the loaded model on short rows, as training does.

    Args:
        trainer: an SFTTrainer.

    Raises:
        RecipeError: on every rank, when training starts.
    """

    def __init__(self, trainer: SFTTrainer) -> None:
        self._trainer = trainer

    @torch.no_grad()
    def on_train_begin(self, args: Any, *_: object, **kwargs: Any) -> None:
        """Check the loss, and whether packed rows are kept apart. Collective."""
        trainer = self._trainer
        model = kwargs["model"].eval()
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # On CPUs, bitsandbytes would repack 4-bit weights, which could not train then.
                module.support_avx512bf16_for_cpu = False
        if trainer.padding_free:
            self._check_packing(model)
        is_nll = args.loss_type in ("nll", "chunked_nll") and not args.label_smoothing_factor
        # Other losses cannot be told from the model's own.
        if is_nll and not trainer.aux_loss_enabled and trainer.compute_loss_func is None:
            self._check_loss(model)

    def _collate(self, *rows: list[int]) -> dict:
        return send_to_device(
            self._trainer.data_collator([{"input_ids": row, "labels": row} for row in rows]),
            self._trainer.args.device,
        )

    def _check_packing(self, model: PreTrainedModel) -> None:
        """Pack the same row first behind one row and then behind another. Compare its outputs.

        Transformers keeps packed rows apart by their position ids. Some models silently ignore
        these ids, like OPT, Mamba, and gpt-oss with eager attention.
        """
        outputs = []
        for first in (ROW, ROW[1:] + ROW[:1]):
            batch = self._collate(first, ROW)
            del batch["labels"]
            outputs.append(model(**batch, use_cache=False).logits[0, len(ROW) :].float())
        if torch.dist(*outputs) > TOLERANCE * outputs[0].norm():
            raise RecipeError(
                f"packing: with attn_implementation {getattr(model.config, ATTENTION, None)}, "
                f"{type(model).__name__} lets packed rows see each other. Set packing: false, or "
                "an attn_implementation that keeps them apart, such as flash_attention_2."
            )

    def _check_loss(self, model: PreTrainedModel) -> None:
        """Compare SFTTrainer's loss with that of the model's own logits.

        TRL multiplies the backbone's output by the head's weight, instead of calling the model. So
        it leaves out what some models do besides, such as a transform in BERT's head.
        """
        batch = self._collate(ROW, ROW)
        loss = self._trainer.compute_loss(model, dict(batch)).item()
        metrics_of(self._trainer)["eval"].clear()
        labels = batch.pop("labels")[:, 1:].flatten()
        logits = model(**batch, use_cache=False).logits
        own_loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels).item()
        tolerance = max(LOSS_TOLERANCE, torch.finfo(logits.dtype).eps)
        if abs(loss - own_loss) > tolerance * own_loss:
            raise RecipeError(
                f"SFTTrainer would train {type(model).__name__} with another loss than its own, "
                f"{loss:.4f} instead of {own_loss:.4f} for the same rows. Use Trainer of "
                "transformers in a script of your own."
            )
