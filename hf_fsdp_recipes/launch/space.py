"""How much a recipe's run writes, from the recipe and the model's config, on meta: an upper bound, not a promise.

Reads the YAML alone, with TRL's and Trainer's defaults where it says nothing; the command line's overrides are not
known here. Imports torch and transformers only when asked for an estimate.

Source: trl 1.16 `ModelConfig` (dtype float32), transformers 5.23 `TrainingArguments` (save_steps 500).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_fsdp_recipes.launch import config_check

MOMENTS = 2  # Adam's; other optimizers keep less
_ADAPTER_DTYPE_BYTES = 4


@dataclass(frozen=True)
class Need:
    """What a run writes.

    Attributes:
        checkpoint_bytes, export_bytes: one checkpoint; all exports.
        num_checkpoints: how many lie there at once, the one being written included.
        is_open_ended: nothing limits their number.
    """

    checkpoint_bytes: int
    export_bytes: int
    num_checkpoints: int
    is_open_ended: bool

    @property
    def total_bytes(self) -> int:
        """All that lies there at the fullest moment."""
        return self.checkpoint_bytes * self.num_checkpoints + self.export_bytes

    def __str__(self) -> str:
        at_least = "at least " if self.is_open_ended else ""
        return (
            f"{at_least}{self.total_bytes / 1e9:,.2f} GB ({self.num_checkpoints} checkpoints of "
            f"{self.checkpoint_bytes / 1e9:,.2f} GB and {self.export_bytes / 1e9:,.2f} GB of exports)"
        )


def estimate(recipe: dict[str, Any]) -> Need:
    """Estimate what a recipe's run writes.

    Raises:
        TemplateError: the model's config cannot be read.
    """
    model = config_check.build_on_meta(str(recipe["model_name_or_path"]), bool(recipe.get("trust_remote_code")))
    item_bytes = _item_bytes(recipe.get("dtype", "float32"), model)
    export_item_bytes = _item_bytes(recipe.get("export_dtype") or recipe.get("dtype", "float32"), model)
    model_parameters = sum(parameter.numel() for parameter in model.parameters())
    if recipe.get("use_peft"):
        trained, item_bytes = _adapter_parameters(model, recipe), _ADAPTER_DTYPE_BYTES
        export_bytes = trained * item_bytes + (
            model_parameters * export_item_bytes if recipe.get("merge_adapter") else 0
        )
    else:
        trained = model_parameters
        export_bytes = trained * export_item_bytes
    copies = 1 if recipe.get("save_only_model") else 1 + MOMENTS
    number, is_open_ended = _count_checkpoints(recipe)
    return Need(trained * item_bytes * copies, export_bytes, number, is_open_ended)


def _item_bytes(dtype: Any, model: Any) -> int:
    import torch

    found = getattr(torch, str(dtype), None) or getattr(model.config, "dtype", None) or torch.float32
    return found.itemsize


def _adapter_parameters(model: Any, recipe: dict[str, Any]) -> int:
    """Count the parameters of a LoRA adapter; without a list of targets, as if on every linear layer."""
    rank = int(recipe.get("lora_r", 16))
    return sum(rank * sum(module.weight.shape) for module in _targets(model, recipe.get("lora_target_modules")))


def _targets(model: Any, wanted: Any) -> Iterator[Any]:
    names = [wanted] if isinstance(wanted, str) else wanted
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_matrix = (
            getattr(getattr(module, "weight", None), "dim", lambda: 0)() == 2
            and "Embedding" not in type(module).__name__
        )
        if is_matrix and module is not head and (names in (None, ["all-linear"]) or name.split(".")[-1] in names):
            yield module


def _count_checkpoints(recipe: dict[str, Any]) -> tuple[int, bool]:
    """Return how many checkpoints lie there at once, and whether that is only what is known for certain."""
    limit = recipe.get("save_total_limit")
    planned = _count_saves(recipe)
    if limit and planned:
        return min(int(limit) + 1, planned), False  # the oldest goes when the new one is complete
    if limit:
        return int(limit) + 1, False
    return (planned, False) if planned else (2, True)


def _count_saves(recipe: dict[str, Any]) -> int | None:
    strategy, steps = recipe.get("save_strategy", "steps"), float(recipe.get("save_steps", 500))
    max_steps = int(recipe.get("max_steps", -1))
    if strategy == "no":
        return 1  # a run that is preempted saves all the same
    if strategy == "epoch":
        return math.ceil(float(recipe.get("num_train_epochs", 3)))
    if 0 < steps < 1:
        return math.ceil(1 / steps)
    return math.ceil(max_steps / steps) if max_steps > 0 and steps >= 1 else None
