"""Checks the values in a recipe: keys that are set twice, numbers out of range, and settings of an adapter without one."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_fsdp_recipes.errors import RecipeError

if TYPE_CHECKING:
    from trl import ModelConfig

# What a number must be, the test for it (false for nan), and the arguments.
_NUMBERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_length lora_r lora_alpha",
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        "weight_decay warmup_steps max_grad_norm dataloader_num_workers shuffle_buffer_size throughput_warmup_steps",
    ),
    ("a finite number of at least 0", lambda value: 0 <= value < math.inf, "learning_rate"),
    ("a positive, finite number", lambda value: 0 < value < math.inf, "num_train_epochs adam_epsilon"),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, "lora_dropout adam_beta1 adam_beta2"),
    ("at least 1, or -1 to train for num_train_epochs", lambda value: value >= 1 or value == -1, "max_steps"),
)


def check_unique_keys(path: str) -> None:
    """Check that a recipe sets no key twice, because YAML would keep the last. Not a collective.

    Raises:
        RecipeError: with the key and both lines. A file that cannot be read is not an error here.
    """
    pending: list[yaml.Node | None] = []
    with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        pending = [yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)]
    while pending:
        node = pending.pop()
        lines: dict[str, int] = {}
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if key.value in lines:
                raise RecipeError(
                    f"{path} sets {key.value} in line {lines[key.value]} and again in line {line}. Drop one."
                )
            lines[key.value] = line
            pending.append(value)


def check_numbers(values: Mapping[str, Any]) -> None:
    """Check that the numbers among the arguments are in range. Not a collective.

    Raises:
        RecipeError: lists all that are not.
    """
    errors = [
        f"{name} is {values[name]}. Set it to {expected}."
        for expected, is_valid, names in _NUMBERS
        for name in names.split()
        if values[name] is not None and not is_valid(values[name])
    ]
    if errors:
        raise RecipeError(" ".join(errors))


def check_adapter(model: "ModelConfig") -> None:
    """Check that settings of an adapter, and quantized weights, come with `use_peft`. Not a collective.

    Raises:
        RecipeError: they do not, so a different training would run, or none.
    """
    if model.use_peft:
        return
    settings = [f for f in fields(model) if f.name.startswith("lora_") or f.name in ("use_dora", "use_rslora")]
    changed = [f.name for f in settings if getattr(model, f.name) != f.default]
    if changed:
        raise RecipeError(
            f"{changed[0]} is {getattr(model, changed[0])} but use_peft is not set, so all parameters would be trained. Set "
            f"use_peft: true, or drop {', '.join(changed)}."
        )
    if model.load_in_4bit or model.load_in_8bit:
        raise RecipeError(
            "quantized weights cannot be trained (load_in_4bit, load_in_8bit). Set use_peft: true to train an adapter on them, "
            "or drop them."
        )
