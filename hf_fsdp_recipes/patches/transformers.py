"""Patches for transformers' Trainer: stop before the first step, and save sharded models."""

from collections.abc import Callable
from typing import Any

from hf_fsdp_recipes.patches.registry import patch

_save_handler: Callable[[Any, str], None] | None = None


def register_save_handler(handler: Callable[[Any, str], None]) -> None:
    """Set the function that saves a trainer's model to a directory if Trainer itself would not. Collective when called."""
    global _save_handler
    _save_handler = handler


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
    changes="With SHARDED_STATE_DICT, a call from the user's script exports the model.",
    reason="Trainer saves FSDP models only with FULL_STATE_DICT; with SHARDED_STATE_DICT it writes nothing, without an error.",
    upstream="to file: Trainer.save_model silently saves nothing with SHARDED_STATE_DICT",
    tested_with="transformers 5.23",
)
def _save_sharded(original: Any, self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    if _save_handler is not None and not _internal_call:
        _save_handler(self, output_dir or self.args.output_dir)
    original(self, output_dir, _internal_call)
