"""Keeps the global batch size when a run resumes on another number of ranks."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_recipes.checkpointing.directory import read_manifest
from hf_fsdp_recipes.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import TrainingArguments


def keep_global_batch(args: "TrainingArguments", checkpoint: str | os.PathLike[str] | None) -> None:
    """Set `gradient_accumulation_steps` so that each step trains as many rows as in the run that saved the checkpoint.

    Call it on every rank before the Trainer is created. Without a checkpoint, nothing changes.

    Raises:
        CheckpointError: no number of accumulation steps gives the same global batch.
    """
    wanted = None if checkpoint is None else (read_manifest(Path(checkpoint)) or {}).get("global_batch_size")
    if wanted is None:
        return
    rows_per_pass = args.train_batch_size * args.world_size
    steps, remainder = divmod(wanted, rows_per_pass)
    if remainder:
        raise CheckpointError(
            f"{checkpoint} was saved with a global batch of {wanted} rows, which {args.world_size} ranks with "
            f"{args.train_batch_size} rows each cannot train. Set per_device_train_batch_size to a divisor of "
            f"{wanted / args.world_size:g}, or change the number of ranks."
        )
    args.gradient_accumulation_steps = steps
