"""Estimates how many bytes a recipe's checkpoints and exports take on disk, from the recipe and the model's shapes.

Source: trl 1.16 `ModelConfig` (dtype float32), transformers 5.23 `TrainingArguments` (save_steps 500).
"""

import contextlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.errors import LoadError

NUM_MOMENTS = 2  # of Adam; other optimizers keep fewer
_ADAPTER_DTYPE_BYTES = 4
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NOT_LINEAR = re.compile(r"embed|wte|wpe|lm_head|norm")


@dataclass(frozen=True)
class DiskEstimate:
    """Disk space that a run needs.

    Attributes:
        checkpoint_bytes: size of one checkpoint.
        export_bytes: total size of all exports.
        num_checkpoints: most checkpoints on disk at once, including the one being written.
        is_lower_bound: whether the number of checkpoints is unlimited, so that the run may need more.
    """

    checkpoint_bytes: int
    export_bytes: int
    num_checkpoints: int
    is_lower_bound: bool

    @property
    def total_bytes(self) -> int:
        """Most bytes on disk at once."""
        return self.checkpoint_bytes * self.num_checkpoints + self.export_bytes

    def __str__(self) -> str:
        at_least = "at least " if self.is_lower_bound else ""
        return (
            f"{at_least}{self.total_bytes / 1e9:,.2f} GB ({self.num_checkpoints} checkpoints of "
            f"{self.checkpoint_bytes / 1e9:,.2f} GB and {self.export_bytes / 1e9:,.2f} GB of exports)"
        )


class Parameter(NamedTuple):
    """Shape of one parameter, and the bytes of one element as the model is stored."""

    shape: tuple[int, ...]
    dtype_bytes: int


def estimate(recipe: dict[str, Any]) -> DiskEstimate:
    """Estimate what a run writes, with TRL's and Trainer's defaults for fields that the recipe omits.

    Raises:
        TemplateError: the model's config cannot be read.
    """
    parameters = read_parameters(str(recipe["model_name_or_path"]), bool(recipe.get("trust_remote_code")))
    dtype = recipe.get("dtype", "float32")
    trained_bytes = _sum_bytes(parameters, dtype)
    export_bytes = _sum_bytes(parameters, recipe.get("export_dtype") or dtype)
    if recipe.get("use_peft"):
        trained_bytes = _count_adapter_parameters(parameters, recipe) * _ADAPTER_DTYPE_BYTES
        export_bytes = trained_bytes + (export_bytes if recipe.get("merge_adapter") else 0)
    num_copies = 1 if recipe.get("save_only_model") else 1 + NUM_MOMENTS
    num_checkpoints, is_lower_bound = _count_checkpoints(recipe)
    return DiskEstimate(trained_bytes * num_copies, export_bytes, num_checkpoints, is_lower_bound)


def read_parameters(model: str, trust_remote_code: bool = False) -> dict[str, Parameter]:
    """Return a model's parameters by name, from the headers of its local files or else from its config.

    Raises:
        TemplateError: there are no local files, and the config cannot be read.
    """
    from huggingface_hub import snapshot_download

    from hf_fsdp_recipes.loading.safetensors_index import open_index  # imports torch

    # If the files are not local, incomplete or not safetensors, the config gives the same shapes.
    with contextlib.suppress(LoadError, OSError, ValueError):
        directory = model if Path(model).is_dir() else snapshot_download(model, local_files_only=True)
        stored = open_index(Path(directory)).tensors.values()
        return {tensor.name: Parameter(tensor.shape, tensor.dtype.itemsize) for tensor in stored}
    built = validate.build_on_meta(model, trust_remote_code)
    dtype = getattr(built.config, "dtype", None)
    return {
        name: Parameter(tuple(parameter.shape), (dtype or parameter.dtype).itemsize)
        for name, parameter in built.named_parameters()
    }


def _sum_bytes(parameters: dict[str, Parameter], dtype: str) -> int:
    dtype_bytes = None if dtype == "auto" else _DTYPE_BYTES.get(str(dtype), 4)
    return sum(math.prod(each.shape) * (dtype_bytes or each.dtype_bytes) for each in parameters.values())


def _count_adapter_parameters(parameters: dict[str, Parameter], recipe: dict[str, Any]) -> int:
    """Count the parameters of a LoRA adapter on the recipe's target modules, by default all linear layers."""
    targets = recipe.get("lora_target_modules") or "all-linear"
    names = [targets] if isinstance(targets, str) else list(targets)
    total = 0
    for name, parameter in parameters.items():
        module = name.removesuffix(".weight").split(".")[-1]
        is_target = module in names or (names == ["all-linear"] and not _NOT_LINEAR.search(name))
        if len(parameter.shape) == 2 and is_target:
            total += int(recipe.get("lora_r", 16)) * sum(parameter.shape)
    return total


def _count_checkpoints(recipe: dict[str, Any]) -> tuple[int, bool]:
    """Return the most checkpoints on disk at once, and whether there may be more."""
    limit, num_saves = recipe.get("save_total_limit"), _count_saves(recipe)
    if limit:
        num_kept = int(limit) + 1  # the oldest is deleted once the new one is complete
        return min(num_kept, num_saves or num_kept), False
    return (num_saves, False) if num_saves else (2, True)


def _count_saves(recipe: dict[str, Any]) -> int | None:
    """Return how often the run saves; None if that depends on the data."""
    strategy, save_steps = recipe.get("save_strategy", "steps"), float(recipe.get("save_steps", 500))
    max_steps = int(recipe.get("max_steps", -1))
    if strategy == "no":
        return 1  # a run that is preempted still saves
    if strategy == "epoch":
        return math.ceil(float(recipe.get("num_train_epochs", 3)))
    if 0 < save_steps < 1:
        return math.ceil(1 / save_steps)
    return math.ceil(max_steps / save_steps) if max_steps > 0 and save_steps >= 1 else None
