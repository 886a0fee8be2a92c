"""Patches for transformers: a checkpoint is compared with the run before Trainer loads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.patches.registry import patch

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
    tested_with="transformers 5.17 to 5.23",
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
    tested_with="transformers 5.17 to 5.23",
)
def _check_then_load(original: Any, self: Any, resume_from_checkpoint: Any, model: Any = None) -> Any:
    if _check is not None and self.is_fsdp_enabled:
        _check(self, Path(resume_from_checkpoint), True)
    return original(self, resume_from_checkpoint, model)
