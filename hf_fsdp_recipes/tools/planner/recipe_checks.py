"""Checks and describes a recipe before it runs, from its settings and the model's config. For dry runs and rehearsals."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.loading.build_on_meta import read_config
from hf_fsdp_recipes.tools.planner.job_options import flatten_arguments
from hf_fsdp_recipes.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_fsdp_recipes.training.arguments import Arguments


def read_model_config(arguments: "Arguments") -> "PreTrainedConfig":
    """Return the config of a recipe's model, pretrained or new."""
    recipe = arguments.recipe
    if recipe.config_name is not None:
        return read_config(recipe.config_name, recipe.config_overrides)
    return read_config(arguments.model.model_name_or_path)


def template_faults(config: dict[str, Any], model: torch.nn.Module) -> list[str]:
    """Return all faults of an Accelerate config for a model (on meta)."""
    return validate.find_faults(config, {type(module).__name__ for module in model.modules()})


def output_faults(arguments: "Arguments") -> Iterator[str]:
    """Yield why the run cannot write its output directory."""
    output = Path(arguments.training.output_dir)
    parent = next(directory for directory in (output, *output.absolute().parents) if directory.is_dir())
    try:
        tempfile.TemporaryDirectory(dir=parent).cleanup()
    except OSError as error:
        yield (
            f"output_dir {output} cannot be written ({error.strerror}). Choose another directory or change its permissions."
        )
        return
    needed = estimate_space(arguments)
    free_bytes = shutil.disk_usage(parent).free
    if needed is not None and needed.total_bytes > free_bytes:
        yield (
            f"output_dir {output} has {format_bytes(free_bytes)} free, but the run writes {needed}. Lower "
            f"save_total_limit, raise save_steps, or use another disk."
        )


def estimate_space(arguments: "Arguments") -> disk_estimate.DiskEstimate | None:
    """Return the disk space that the run will use, or None for a new model."""
    if arguments.model.model_name_or_path is None:
        return None
    return disk_estimate.estimate(flatten_arguments(arguments))


def describe_batches(arguments: "Arguments", num_ranks: int) -> Iterator[str]:
    """Yield the batch size, tokens, number of steps and learning rate of a run on `num_ranks` ranks, one line each."""
    training = arguments.training
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    rows = batch * accumulation * num_ranks
    yield f"batch: {batch} rows x {accumulation} micro-batches x {num_ranks} ranks = {rows} rows per step"
    if training.max_length is not None:
        at_most = "" if training.packing else "at most "
        yield f"tokens: {at_most}{rows * training.max_length:,} per step ({training.max_length} per row)"
    if training.max_steps > 0:
        yield f"steps: {training.max_steps}, {training.max_steps * rows:,} rows in total"
    else:
        yield f"steps: {training.num_train_epochs:g} epochs; the number of steps is known once the dataset is prepared"
    settings = flatten_arguments(arguments)
    yield f"learning rate: {training.learning_rate:g}, {settings['lr_scheduler_type']}, {settings['optim']}"
