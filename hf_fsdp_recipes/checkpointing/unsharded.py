"""Adds manifests to checkpoints that Trainer writes itself, in one process or under DDP.

`resume_from_checkpoint=auto` finds only checkpoints with a manifest.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes.checkpointing import layout, resume, small_files
from hf_fsdp_recipes.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


def is_supported(args: "TrainingArguments", state: "TrainerState") -> bool:
    """Return whether manifests can be added to Trainer's checkpoints.

    They can if Trainer runs in one process or under DDP, writes each checkpoint only once, directly below `output_dir`, and does
    not push it to the Hub.
    """
    from accelerate.state import AcceleratorState

    is_elsewhere = state.is_hyper_param_search or args.save_on_each_node or args.push_to_hub
    return AcceleratorState().distributed_type.value.startswith(("NO", "MULTI_")) and not is_elsewhere


def complete_checkpoint(
    args: "TrainingArguments", state: "TrainerState", model: torch.nn.Module, facts: Mapping[str, object]
) -> Path | None:
    """Add `train_params.yaml` and a manifest to the checkpoint that Trainer has just written.

    Returns the checkpoint's path, or None if Trainer has not written one. Reads all files to compute their checksums. Rank 0
    only.
    """
    directory = layout.directory_for(args.output_dir, state.global_step)
    if not directory.is_dir():
        return None
    try:
        (directory / resume.PARAMS_FILE).write_bytes(small_files.format_params(args, model))
    except OSError as error:
        raise CheckpointError(
            f"{directory / resume.PARAMS_FILE} cannot be written: {error.strerror}. Check permissions and free space."
        ) from error
    layout.complete_in_place(directory, {"step": state.global_step, **facts})
    return directory
