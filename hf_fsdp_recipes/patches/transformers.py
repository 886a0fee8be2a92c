"""Patches for transformers' Trainer, for sharded models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.errors import CheckpointError, RecipeError
from hf_fsdp_recipes.patches.registry import patch, versions_of

ResumeCheck = Callable[[Any, Path, bool], None]
_check: ResumeCheck | None = None


def register_resume_check(check: ResumeCheck) -> None:
    """Set the check of the checkpoints that FSDP runs resume from.

    It is called with the trainer, the checkpoint and whether the model is sharded: once before the model is sharded and its
    weights are read, and once after. Collective.
    """
    global _check
    _check = check


@patch(
    "transformers.trainer.Trainer._prepare_for_training",
    *("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
    feature="checkpointing",
    changes="A checkpoint is checked before the model is sharded, and errors of DCP become one CheckpointError.",
    reason="Trainer loads what matches by name: a checkpoint of a larger model trains on without an error.",
    upstream="to file: resuming a sharded checkpoint of another model is not refused",
    tested_with=versions_of("transformers"),
)
def _check_then_prepare(
    original: Any, self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
) -> Any:
    from torch.distributed.checkpoint import CheckpointException

    if resume_from_checkpoint is not None and _check is not None and self.is_fsdp_enabled:
        _check(self, Path(resume_from_checkpoint), False)
    try:
        return original(self, max_steps, train_dataloader, resume_from_checkpoint)
    except CheckpointException as error:  # not an Exception; the same on every rank
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{resume_from_checkpoint} cannot be loaded: {cause}") from error


@patch(
    "transformers.trainer.Trainer._load_from_checkpoint",
    *("self", "resume_from_checkpoint", "model"),
    feature="checkpointing",
    changes="A checkpoint is compared with the sharded model and its optimizer before it is loaded.",
    reason="As for `_prepare_for_training`; the optimizer's state and the dtypes are known only once the model is sharded.",
    upstream="to file: resuming a sharded checkpoint of another optimizer is not refused",
    tested_with=versions_of("transformers"),
)
def _check_then_load(original: Any, self: Any, resume_from_checkpoint: Any, model: Any = None) -> Any:
    if _check is not None and self.is_fsdp_enabled:
        _check(self, Path(resume_from_checkpoint), True)
    return original(self, resume_from_checkpoint, model)


@patch(
    "transformers.trainer.Trainer._run_epoch",
    *("self", "model", "epoch"),
    feature="checkpointing",
    changes="Trains no step if a callback has already stopped training.",
    reason="After `should_training_stop` in `on_train_begin`, Trainer still trains one step, so each resume of a finished run "
    "would add one.",
    upstream="to file: should_training_stop set in on_train_begin is ignored until after the first step",
    tested_with=versions_of("transformers"),
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
    tested_with=versions_of("transformers"),
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
    tested_with=versions_of("transformers"),
)
def _evaluate_sharded(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(self.accelerator, "is_fsdp2", False) and not self.accelerator._models:
        raise RecipeError(
            "evaluate() was called before train(), which shards the model under FSDP2. Call train() first, or set "
            "eval_on_start to evaluate before the first step."
        )
    return original(self, *args, **kwargs)
