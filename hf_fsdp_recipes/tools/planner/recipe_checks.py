"""What can be said of a recipe and a template without weights: faults, batches, bytes. Starts nothing.

Reads the recipe as the run does, the model's config, and nothing of its weights.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.export.hub import read_target
from hf_fsdp_recipes.loading.build_on_meta import read_config


def read_model_config(arguments: Any) -> Any:
    """Return the config of a recipe's model, loaded or new. No collective."""
    recipe = arguments.recipe
    if recipe.config_name is not None:
        return read_config(recipe.config_name, recipe.config_overrides)
    return read_config(arguments.model.model_name_or_path)


def template_faults(config: dict[str, Any], model: Any) -> list[str]:
    """Return what is wrong with an Accelerate config for a model (on meta)."""
    return validate.find_faults(config, {type(module).__name__ for module in model.modules()})


def output_faults(arguments: Any) -> Iterator[str]:
    """Yield why the output directory cannot take what the run will write."""
    output = Path(arguments.training.output_dir)
    parent = next(directory for directory in (output, *output.absolute().parents) if directory.is_dir())
    try:
        tempfile.TemporaryDirectory(dir=parent).cleanup()
    except OSError as error:
        yield f"output_dir: {output} cannot be written ({error.strerror}). Remedy: another output_dir, or its permissions."
        return
    need = estimate_space(arguments)
    free = shutil.disk_usage(parent).free
    if need is not None and need.total_bytes > free:
        yield (
            f"output_dir: {output} has {free / 1e9:,.1f} GB free and the run writes {need}. Remedy: save_total_limit, "
            f"larger save_steps, or another disk."
        )


def estimate_space(arguments: Any) -> Any:
    """Return what the run will write, or None for a new model."""
    if arguments.model.model_name_or_path is None:
        return None
    training, model, recipe = arguments.training, arguments.model, arguments.recipe
    wishes = {
        name: getattr(training, name) for name in ("save_total_limit", "save_steps", "max_steps", "num_train_epochs")
    }
    wishes |= {
        name: getattr(model, name) for name in ("model_name_or_path", "use_peft", "lora_r", "lora_target_modules")
    }
    wishes |= {"save_strategy": str(getattr(training.save_strategy, "value", training.save_strategy))}
    wishes |= {"dtype": model.dtype, "export_dtype": recipe.export_dtype, "merge_adapter": recipe.merge_adapter}
    return disk_estimate.estimate(wishes)


def hub_faults(arguments: Any) -> Iterator[str]:
    """Yield why pushing will fail."""
    try:
        read_target(arguments.training)
    except RecipeError as error:
        yield str(error)


def describe_batches(arguments: Any, num_ranks: int, num_rows: int | None = None) -> Iterator[str]:
    """Yield the arithmetic of batches and steps.

    Args:
        arguments: the recipe's.
        num_ranks: of the real job.
        num_rows: training rows (packed ones count as what they were), where they are known.
    """
    training = arguments.training
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * num_ranks
    yield (
        f"batch: {training.per_device_train_batch_size} rows x {training.gradient_accumulation_steps} micro-batches x "
        f"{num_ranks} ranks = {per_step} rows a step"
    )
    if training.max_length is not None:
        at_most = "" if training.packing else "at most "
        yield f"tokens: {at_most}{per_step * training.max_length:,} a step ({training.max_length} a row)"
    if training.max_steps > 0:
        yield f"steps: {training.max_steps}, {training.max_steps * per_step:,} rows in all"
    elif num_rows is not None and not training.packing:
        steps = -(-num_rows // per_step)
        yield f"steps: {steps} an epoch of {num_rows:,} rows, {int(steps * training.num_train_epochs)} in all"
    else:
        yield f"steps: {training.num_train_epochs:g} epochs; their length is known when the rows are prepared"
    scheduler, optimizer = (getattr(wish, "value", wish) for wish in (training.lr_scheduler_type, training.optim))
    yield f"learning rate: {training.learning_rate:g}, {scheduler}, {optimizer}"
