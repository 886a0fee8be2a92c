"""Checks the values in a recipe: keys that are set twice, numbers out of range, and settings of an adapter without one."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

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


def check_types(path: str, classes: Iterable[type]) -> None:
    """Check the types and choices in a recipe; argparse only converts texts. Not a collective.

    Args:
        path: the recipe. A file that cannot be read is not an error here.
        classes: dataclasses with the recipe's fields.

    Raises:
        RecipeError: lists all values that do not fit.
    """
    values: Any = None
    with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    hints = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}
    errors = [
        f"{name} is {value!r:.80}. Set it to {_describe(hints[name])}."
        for name, value in (values.items() if isinstance(values, dict) else ())
        if name in hints and not _fits(value, hints[name])
    ]
    if errors:
        raise RecipeError(f"{path}: {' '.join(errors)}")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value from YAML has the type of a field, or is a text that argparse converts."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return value in parts
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(hint) in (list, tuple):
        return isinstance(value, str) or (isinstance(value, list) and all(_fits(item, parts[0]) for item in value))
    if value is None or hint is type(None):
        return value is None and hint is type(None)
    if isinstance(value, bool):
        return hint in (bool, str)  # YAML reads an unquoted no as false
    if isinstance(value, dict):
        return hint is dict or get_origin(hint) is dict or is_dataclass(hint)
    numbers: dict[Any, Any] = {int: int, float: (int, float)}
    return isinstance(value, str) or not isinstance(hint, type) or isinstance(value, numbers.get(hint, hint))


def _describe(hint: Any) -> str:
    """Return a field's type in words: `one of auto, sdpa`, `int or none`."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe(part) for part in get_args(hint))
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "null"}
    return names.get(hint, str(getattr(hint, "__name__", hint)))


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
