"""Patches for transformers' Trainer, for sharded models."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes.errors import CheckpointError, RecipeError
from hf_fsdp_recipes.patches.registry import Original, Patch

if TYPE_CHECKING:
    import torch
    from optuna import Trial
    from torch.nn.modules.module import _IncompatibleKeys
    from torch.utils.data import DataLoader
    from transformers import Trainer
    from transformers.trainer_utils import EvalLoopOutput

_patch = functools.partial(Patch, feature="checkpointing")
ResumeCheck = Callable[["Trainer", Path, bool], None]
_check: ResumeCheck | None = None


def register_resume_check(check: ResumeCheck) -> None:
    """Set the function that checks the checkpoint from which a run resumes.

    `check` gets the trainer, the checkpoint and whether the model is sharded. Under FSDP it is called before and after the
    model is sharded; without FSDP once, before the weights are read. The calls are collective.
    """
    global _check
    _check = check


@_patch(
    "transformers.trainer.Trainer._prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint)",
    changes="A checkpoint is checked before the model is sharded, and DCP's errors become one CheckpointError. Training after an "
    "evaluation under FSDP1 is refused, and so are settings that Trainer cannot apply to a model that transformers has sharded. "
    "Callbacks with a method `see_trainer` get the trainer and the checkpoint to resume from.",
    reason="Trainer loads whatever matches by name, so resuming a larger model's checkpoint raises no error. A callback that "
    "saves checkpoints also saves the states of the other callbacks, for which it needs the trainer.",
    upstream="to file: resuming a sharded checkpoint of another model is not refused",
)
def _check_then_prepare(
    original: Original,
    self: "Trainer",
    max_steps: int,
    train_dataloader: "DataLoader",
    resume_from_checkpoint: str | None,
) -> object:
    from torch.distributed.checkpoint import CheckpointException

    _refuse_presharded(self, self.is_fsdp_enabled or self.args.load_best_model_at_end)
    if type(self.model).__name__ == "FullyShardedDataParallel" and self.optimizer is None:
        raise RecipeError(
            "train() was called after evaluate(), which sharded the model without an optimizer under FSDP1. Call train() first, "
            "or set eval_on_start to evaluate before the first step."
        )
    checkpoint = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
    if checkpoint is not None and _check is not None and self.is_fsdp_enabled:
        _check(self, checkpoint, False)
    for callback in self.callback_handler.callbacks:
        if hasattr(callback, "see_trainer"):
            callback.see_trainer(self, checkpoint)
    try:
        return original(self, max_steps, train_dataloader, resume_from_checkpoint)
    except CheckpointException as error:  # a BaseException; the same on every rank
        cause = next(iter(error.failures.values()))[0]
        if getattr(cause, "is_agreed", False):  # its message names the checkpoint
            raise cause from error
        raise CheckpointError(f"{resume_from_checkpoint} cannot be loaded: {cause}") from error


@_patch(
    "transformers.trainer.Trainer._load_from_checkpoint(self, resume_from_checkpoint, model)",
    changes="A checkpoint is compared with the sharded model and its optimizer before it is loaded. Without FSDP, its files are "
    "verified.",
    reason="Trainer loads whatever matches by name, and the optimizer's state and the dtypes are known only after sharding.",
    upstream="to file: resuming a sharded checkpoint of another optimizer is not refused",
)
def _check_then_load(
    original: Original, self: "Trainer", resume_from_checkpoint: str, model: "torch.nn.Module | None" = None
) -> None:
    _refuse_presharded(self)
    if _check is not None:
        _check(self, Path(resume_from_checkpoint), self.is_fsdp_enabled)
    return original(self, resume_from_checkpoint, model)


def _refuse_presharded(trainer: "Trainer", is_needed: bool = True) -> None:
    """Raise a CheckpointError if transformers has already sharded the model on load.

    Trainer can neither shard such a model again nor load a checkpoint into it. `is_needed` is whether this run does either.
    """
    if is_needed and getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise CheckpointError(
            "from_pretrained(distributed_config=...) has sharded the model, so an FSDP template cannot shard it again, and Trainer "
            "cannot load a checkpoint into it (resume_from_checkpoint, load_best_model_at_end). Load the model with load_model "
            "and launch with an fsdp2_*.yaml template, or drop these settings and the template."
        )


@_patch(
    "transformers.trainer.Trainer._issue_warnings_after_load(self, load_result)",
    changes="Without FSDP, resuming and loading the best model refuse a checkpoint that lacks tensors of the model, except tied "
    "weights, or has additional ones.",
    reason="Without FSDP, Trainer loads whatever matches by name and only logs a warning.",
    upstream="to file: resuming from a checkpoint of another model is only a warning",
)
def _refuse_other_model(original: Original, self: "Trainer", load_result: "_IncompatibleKeys") -> None:
    missing = set(load_result.missing_keys) - set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
    if missing:
        state = self.model.state_dict()
        loaded = {tensor.data_ptr() for name, tensor in state.items() if name not in load_result.missing_keys}
        missing = {name for name in missing if state[name].data_ptr() not in loaded}  # without tied weights
    lacking, unused = "lacks {} tensors of this run's model", "has {} tensors that this run's model lacks"
    for text, names in {unused: sorted(load_result.unexpected_keys), lacking: sorted(missing)}.items():
        if names:
            raise CheckpointError(
                f"the checkpoint {text.format(len(names))}, such as {names[0]}. Use the model of the checkpoint's run. Without "
                f"FSDP, Trainer cannot read its own checkpoints of models whose tensors transformers renames, such as mixtures "
                f"of experts: launch those with an FSDP template."
            )
    original(self, load_result)


@_patch(
    "transformers.trainer.Trainer._run_epoch(self, model, epoch)",
    changes="No step is trained if a callback has already stopped training.",
    reason="If `on_train_begin` sets `should_training_stop`, Trainer still trains one step, so each resume of a finished run "
    "would train one step more.",
    upstream="to file: should_training_stop set in on_train_begin is ignored until after the first step",
)
def _skip_epoch_if_stopped(original: Original, self: "Trainer", *args: Any, **kwargs: Any) -> None:
    if not self.control.should_training_stop:
        original(self, *args, **kwargs)


@_patch(
    "transformers.trainer.Trainer.save_model(self, output_dir, _internal_call)",
    changes="A call from the user's script also calls `save_sharded_model` of each callback that defines this method.",
    reason="With SHARDED_STATE_DICT, Trainer silently writes nothing.",
    upstream="to file: Trainer.save_model silently saves nothing with SHARDED_STATE_DICT",
)
def _save_sharded(
    original: Original, self: "Trainer", output_dir: str | None = None, _internal_call: bool = False
) -> None:
    for callback in self.callback_handler.callbacks:
        if hasattr(callback, "save_sharded_model") and not _internal_call:
            callback.save_sharded_model(self, output_dir or self.args.output_dir)
    original(self, output_dir, _internal_call)


@_patch(
    "transformers.trainer.Trainer._save_checkpoint(self, model, trial)",
    changes="After each save, every rank passes its error, or None, to `end_save` of the callback with `handles_failed_saves`.",
    reason="On a full disk, Trainer ends the run with a traceback and leaves an unusable checkpoint.",
    upstream="to file: a failed save ends the run and leaves an incomplete checkpoint directory",
)
def _pass_on_failed_save(
    original: Original, self: "Trainer", model: "torch.nn.Module", trial: "Trial | dict[str, Any] | None"
) -> None:
    handlers = [one for one in self.callback_handler.callbacks if getattr(one, "handles_failed_saves", False)]
    if not handlers:
        return original(self, model, trial)
    save_model, failures, previous_best = self.save_model, [], self.state.best_model_checkpoint

    def save_model_first(*args: Any, **kwargs: Any) -> None:
        try:
            save_model(*args, **kwargs)
        except Exception as error:  # not raised yet: the other ranks continue the save and may wait for this rank
            failures.append(error)

    self.save_model = save_model_first
    try:
        original(self, model, trial)
    except Exception as error:
        failures.append(error)
    finally:
        del self.save_model
    handlers[0].end_save(self.args, self.state, failures[0] if failures else None, previous_best)


@_patch(
    "transformers.trainer.Trainer.evaluation_loop(self, dataloader, description)",
    changes="Evaluation before training under FSDP2 is refused with a message that names the alternative.",
    reason="Accelerate shards FSDP2 models only together with an optimizer, and its error does not say what to do.",
    upstream="to file: evaluate() before train() fails under FSDP2",
)
def _evaluate_sharded(original: Original, self: "Trainer", *args: Any, **kwargs: Any) -> "EvalLoopOutput":
    if getattr(self.accelerator, "is_fsdp2", False) and not self.accelerator._models:
        raise RecipeError(
            "evaluate() was called before train(), which shards the model under FSDP2. Call train() first, or set "
            "eval_on_start to evaluate before the first step."
        )
    return original(self, *args, **kwargs)
