"""How much a recipe's run writes, from the recipe and the model's shapes: an estimate, not a promise.

Reads the YAML alone, with TRL's and Trainer's defaults where it says nothing; the command line's overrides are not
known here. Imports torch and transformers only for a model whose files are not here.

Source: trl 1.16 `ModelConfig` (dtype float32), transformers 5.23 `TrainingArguments` (save_steps 500).
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.configs import validate

MOMENTS = 2  # Adam's; other optimizers keep less
_ADAPTER_ITEM_BYTES = 4
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NOT_LINEAR = re.compile(r"embed|wte|wpe|lm_head|norm")


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


@dataclass(frozen=True)
class Parameter:
    """Shape of one parameter, and the bytes of an element as the model is stored."""

    shape: tuple[int, ...]
    item_bytes: int


def estimate(recipe: dict[str, Any]) -> Need:
    """Estimate what a recipe's run writes.

    Raises:
        TemplateError: the model's config cannot be read.
    """
    parameters = read_parameters(str(recipe["model_name_or_path"]), bool(recipe.get("trust_remote_code")))
    dtype = recipe.get("dtype", "float32")
    model_bytes = _sum_bytes(parameters, dtype)
    exported_bytes = _sum_bytes(parameters, recipe.get("export_dtype") or dtype)
    trained_bytes = model_bytes
    if recipe.get("use_peft"):
        trained_bytes = _adapter_parameters(parameters, recipe) * _ADAPTER_ITEM_BYTES
        exported_bytes = trained_bytes + (exported_bytes if recipe.get("merge_adapter") else 0)
    copies = 1 if recipe.get("save_only_model") else 1 + MOMENTS
    number, is_open_ended = _count_checkpoints(recipe)
    return Need(trained_bytes * copies, exported_bytes, number, is_open_ended)


def read_parameters(model: str, trust_remote_code: bool = False) -> dict[str, Parameter]:
    """Return a model's parameters by name: from the headers of its files if they are here, else built on meta.

    Raises:
        TemplateError: neither files nor a config that can be read.
    """
    directory = _find_directory(model)
    if directory is not None and (found := _read_headers(directory)):
        return found
    built = validate.build_on_meta(model, trust_remote_code)
    stored = getattr(built.config, "dtype", None)
    return {
        name: Parameter(tuple(parameter.shape), (stored or parameter.dtype).itemsize)
        for name, parameter in built.named_parameters()
    }


def _find_directory(model: str) -> Path | None:
    """Return where a model's files lie: itself, or its place in the Hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _read_headers(directory: Path) -> dict[str, Parameter]:
    """Read the headers of a model's safetensors files; nothing if one of them is not there."""
    from safetensors import SafetensorError, safe_open

    index = directory / "model.safetensors.index.json"
    found = {}
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        for name in names:
            with safe_open(directory / name, framework="np") as file:
                for key in file.keys():  # noqa: SIM118, it is no mapping
                    part = file.get_slice(key)
                    bits = int(re.sub(r"\D", "", part.get_dtype().split("_")[0]) or 8)
                    found[key] = Parameter(tuple(part.get_shape()), bits // 8)
    except (OSError, ValueError, KeyError, SafetensorError):
        return {}
    return found


def _sum_bytes(parameters: dict[str, Parameter], dtype: str) -> int:
    item_bytes = None if dtype == "auto" else _ITEM_BYTES.get(str(dtype), 4)
    return sum(math.prod(each.shape) * (item_bytes or each.item_bytes) for each in parameters.values())


def _adapter_parameters(parameters: dict[str, Parameter], recipe: dict[str, Any]) -> int:
    """Count the parameters of a LoRA adapter; without a list of targets, as if on every linear layer."""
    wanted = recipe.get("lora_target_modules") or "all-linear"
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    total = 0
    for name, parameter in parameters.items():
        module = name.removesuffix(".weight").split(".")[-1]
        is_target = module in names or (names == ["all-linear"] and not _NOT_LINEAR.search(name))
        if len(parameter.shape) == 2 and is_target:
            total += int(recipe.get("lora_r", 16)) * sum(parameter.shape)
    return total


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
