"""Recognizes a run that had already ended when it was resumed: at its last step, or by early stopping."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.run_identity import read_run

if TYPE_CHECKING:
    from transformers import EarlyStoppingCallback, TrainerState

PATIENCE = "early_stopping_patience"  # manifest key; its value is null unless early stopping ended the run


def find_end(state: "TrainerState", checkpoint: Path | None, callbacks: Iterable[object]) -> str | None:
    """Return how the run resumed from `checkpoint` had already ended (last step or early stopping), or None if it continues."""
    if state.global_step == 0:
        return None
    if state.max_steps <= state.global_step:
        return f"the run ended at step {state.global_step} of {state.max_steps}"
    manifest = layout.read_manifest(checkpoint) if checkpoint is not None else {}
    patience = min((one.early_stopping_patience for one in _find_early_stopping(callbacks)), default=None)
    recorded = manifest.get(PATIENCE) if manifest.get("run") == read_run(state) else None
    if not isinstance(recorded, int) or patience is None or patience > recorded:
        return None
    return (
        f"early stopping ended the run at step {state.global_step} of {state.max_steps} (to continue, raise "
        f"early_stopping_patience above {recorded})"
    )


def read_patience(callbacks: Iterable[object]) -> int | None:
    """Return the patience of the EarlyStoppingCallback that stops the run now, or None if none does."""
    from transformers import TrainerControl

    callbacks = list(callbacks)
    is_stopping = any(isinstance(one, TrainerControl) and one.should_training_stop for one in callbacks)
    found = _find_early_stopping(callbacks) if is_stopping else []
    used_up = [one for one in found if one.early_stopping_patience_counter >= one.early_stopping_patience]
    return min((one.early_stopping_patience for one in used_up), default=None)


def _find_early_stopping(callbacks: Iterable[object]) -> "list[EarlyStoppingCallback]":
    from transformers import EarlyStoppingCallback

    return [one for one in callbacks if isinstance(one, EarlyStoppingCallback)]
