"""Estimates how many bytes a recipe's checkpoints and exports take on disk, from the recipe and the model's shapes.

Source: defaults of trl 1.16 `ModelConfig` (dtype float32) and transformers 5.23 `TrainingArguments` (save_steps 500).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.errors import TemplateError, summarize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_MOMENTS = 2  # moments that Adam keeps per parameter; other optimizers keep fewer
_ADAPTER_DTYPE_BYTES = 4
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class DiskEstimate:
    """Disk space that a run needs."""

    checkpoint_bytes: int  # bytes of one checkpoint
    export_bytes: int  # bytes of all exports together
    num_checkpoints: int  # maximum number of checkpoints on disk, including the one being written; 2 if unknown
    is_lower_bound: bool  # whether the number of checkpoints is unknown, so the run may need more space

    @property
    def total_bytes(self) -> int:
        """The most bytes that the run's checkpoints and exports take on disk; the least if `is_lower_bound`."""
        return self.checkpoint_bytes * self.num_checkpoints + self.export_bytes

    def __str__(self) -> str:
        at_least = "at least " if self.is_lower_bound else ""
        return (
            f"{at_least}{self.total_bytes / 1e9:,.2f} GB ({self.num_checkpoints} checkpoints of "
            f"{self.checkpoint_bytes / 1e9:,.2f} GB and {self.export_bytes / 1e9:,.2f} GB of exports)"
        )


def estimate(recipe: validate.Section) -> DiskEstimate:
    """Estimate the disk space of a run, with TRL's and Trainer's defaults for fields that the recipe omits.

    Raises a TemplateError if the model cannot be built from its config.
    """
    model = validate.build_on_meta(str(recipe["model_name_or_path"]), bool(recipe.get("trust_remote_code")))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(recipe.get("dtype", "float32"))
    sizes = _DTYPE_BYTES | {"auto": getattr(model.config.dtype, "itemsize", 4)}
    trained_bytes = num_parameters * sizes.get(dtype, 4)
    export_bytes = num_parameters * sizes.get(str(recipe.get("export_dtype") or dtype), 4)
    if recipe.get("use_peft"):
        trained_bytes = _count_adapter_parameters(model, recipe) * _ADAPTER_DTYPE_BYTES
        export_bytes = trained_bytes + (export_bytes if recipe.get("merge_adapter") else 0)
    num_copies = 1 if recipe.get("save_only_model") else 1 + NUM_MOMENTS
    num_checkpoints, is_lower_bound = _count_checkpoints(recipe)
    return DiskEstimate(trained_bytes * num_copies, export_bytes, num_checkpoints, is_lower_bound)


def _count_adapter_parameters(model: "PreTrainedModel", recipe: validate.Section) -> int:
    """Add the recipe's LoRA adapter to the meta model, by default on all linear layers, and count the adapter's parameters."""
    from peft import LoraConfig, get_peft_model

    parameters = recipe.get("lora_target_parameters")
    config = LoraConfig(
        r=int(recipe.get("lora_r", 16)),
        target_modules=recipe.get("lora_target_modules") or ([] if parameters else "all-linear"),
        target_parameters=[parameters] if isinstance(parameters, str) else parameters,
    )
    try:
        adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        raise TemplateError(f"the recipe's adapter does not fit its model: {summarize(error, 'line')}") from error
    return sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)


def _count_checkpoints(recipe: validate.Section) -> tuple[int, bool]:
    """Return (maximum number of checkpoints on disk, False), or (a lower bound, True) if the maximum is unknown."""
    limit, num_saves = recipe.get("save_total_limit"), _count_saves(recipe)
    if limit:
        num_kept = int(limit) + 1  # the oldest is deleted only after the new one is complete
        return min(num_kept, num_saves or num_kept), False
    return (num_saves, False) if num_saves else (2, True)


def _count_saves(recipe: validate.Section) -> int | None:
    """Return how many checkpoints the run saves, or None if their number depends on the data."""
    strategy, save_steps = recipe.get("save_strategy", "steps"), float(recipe.get("save_steps", 500))
    max_steps = int(recipe.get("max_steps", -1))
    if strategy == "no":
        return 1  # even with this strategy, a preempted run saves a checkpoint
    if strategy == "epoch":
        return math.ceil(float(recipe.get("num_train_epochs", 3)))
    if 0 < save_steps < 1:
        return math.ceil(1 / save_steps)
    return math.ceil(max_steps / save_steps) if max_steps > 0 and save_steps >= 1 else None
