"""Patches for transformers' Trainer, for sharded models."""

from typing import Any

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.patches.registry import patch


@patch(
    "transformers.trainer.Trainer._run_epoch",
    *("self", "model", "epoch"),
    feature="checkpointing",
    changes="Trains no step if a callback has already stopped training.",
    reason="After `should_training_stop` in `on_train_begin`, Trainer still trains one step, so each resume of a finished run "
    "would add one.",
    upstream="to file: should_training_stop set in on_train_begin is ignored until after the first step",
    tested_with="transformers 5.23",
)
def _skip_epoch_if_stopped(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if not self.control.should_training_stop:
        original(self, *args, **kwargs)


@patch(
    "transformers.trainer.Trainer.save_model",
    *("self", "output_dir", "_internal_call"),
    feature="checkpointing",
    changes="A call from the user's script also calls `save_sharded_model` of the callbacks that have it.",
    reason="With SHARDED_STATE_DICT, Trainer writes nothing, without an error.",
    upstream="to file: Trainer.save_model silently saves nothing with SHARDED_STATE_DICT",
    tested_with="transformers 5.23",
)
def _save_sharded(original: Any, self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    for callback in self.callback_handler.callbacks:
        if hasattr(callback, "save_sharded_model") and not _internal_call:
            callback.save_sharded_model(self, output_dir or self.args.output_dir)
    original(self, output_dir, _internal_call)


@patch(
    "transformers.trainer.Trainer.evaluation_loop",
    *("self", "dataloader", "description"),
    feature="checkpointing",
    changes="Evaluation before training under FSDP2 is refused with a message that names the alternative.",
    reason="Accelerate shards FSDP2 models only together with an optimizer, and its error does not say what to do.",
    upstream="to file: evaluate() before train() fails under FSDP2",
    tested_with="transformers 5.23",
)
def _evaluate_sharded(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(self.accelerator, "is_fsdp2", False) and not self.accelerator._models:
        raise RecipeError(
            "evaluate() was called before train(), which shards the model under FSDP2. Call train() first, or set "
            "eval_on_start to evaluate before the first step."
        )
    return original(self, *args, **kwargs)
