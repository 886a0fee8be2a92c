"""Checks a recipe for duplicate keys, values of the wrong type or range, and settings that do not fit together."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.errors import RecipeError, summarize

if TYPE_CHECKING:
    from trl import ModelConfig, SFTConfig

# Each entry: an allowed range in words, a function that tests a value (false for nan), and the names of the arguments.
_NUMBERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_length lora_r lora_alpha "
        "dataset_num_proc ddp_timeout",
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        "weight_decay warmup_steps max_grad_norm dataloader_num_workers shuffle_buffer_size throughput_warmup_steps",
    ),
    ("a finite number of at least 0", lambda value: 0 <= value < math.inf, "learning_rate"),
    (
        "a positive, finite number",
        lambda value: 0 < value < math.inf,
        "num_train_epochs adam_epsilon save_steps eval_steps logging_steps",
    ),
    ("at least 0 and below 2**32", lambda value: 0 <= value < 2**32, "seed"),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, "lora_dropout adam_beta1 adam_beta2"),
    ("at least 1, or -1 to train for num_train_epochs", lambda value: value >= 1 or value == -1, "max_steps"),
)


def check_recipe(path: str, classes: Iterable[type]) -> dict[str, Any]:
    """Read a recipe, check its values, and return them. `classes` are the dataclasses with its fields. Not a collective.

    Raises a RecipeError that lists duplicate keys, or all values of the wrong type. Otherwise these errors would pass unnoticed:
    argparse converts only strings, YAML keeps the last of two equal keys, and neither checks a field's allowed values.
    """
    values = read_recipe(path)
    choices = {field.name: field.metadata.get("choices") for cls in classes for field in fields(cls)}
    hints = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}
    errors = []
    for name, value in values.items():
        if name not in choices:
            continue
        allowed = choices[name]
        hint = Literal[tuple(allowed)] | None if allowed else hints[name]
        if value is False and name.endswith("_strategy"):
            errors.append(f'{name} is false, because YAML reads an unquoted no as false. Write {name}: "no".')
        elif not _fits(value, hint):
            errors.append(f"{name} is {value!r:.80}. Set it to {_describe(hint)}.")
    if errors:
        raise RecipeError(f"{path}: {' '.join(errors)}")
    return values


def name_settings(message: str, values: Mapping[str, object]) -> str:
    """Return `name: value: ` for the first string setting whose value, but not name, is in a library's message; else ''."""
    texts = {name: value for name, value in values.items() if isinstance(value, str) and len(value) > 3}
    quoted = [name for name, value in texts.items() if value.lower() in message.lower() and name not in message]
    return "".join(f"{name}: {values[name]}: " for name in quoted[:1])


def _fits(value: object, hint: object) -> bool:
    """Return whether a value from YAML has a field's type or is a string, which argparse converts later."""
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
    return (
        isinstance(value, str)
        or not isinstance(hint, type)
        or isinstance(value, (int, float) if hint is float else hint)
    )


def _describe(hint: object) -> str:
    """Return a field's type in words, such as `one of auto, sdpa` or `an integer or null`."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe(part) for part in get_args(hint))
    names: dict[object, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    names[type(None)] = "null"
    return names.get(hint, str(getattr(hint, "__name__", hint)))


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raise a RecipeError that lists all out-of-range numbers among the arguments. Not a collective."""
    errors = [
        f"{name} is {values[name]}. Set it to {expected}."
        for expected, is_valid, names in _NUMBERS
        for name in names.split()
        if values.get(name) is not None and not is_valid(values[name])
    ]
    if errors:
        raise RecipeError(" ".join(errors))


def check_scheduler(training: "SFTConfig") -> None:
    """Raise a RecipeError if Trainer cannot build the learning-rate schedule from `lr_scheduler_kwargs`."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    steps = training.max_steps if training.max_steps > 0 else 1000
    kind, kwargs = training.lr_scheduler_type, training.lr_scheduler_kwargs
    try:
        get_scheduler(kind, optimizer, 0, steps, kwargs)
    except Exception as error:  # each schedule is a separate function and may raise anything
        raise RecipeError(
            f"lr_scheduler_kwargs is {kwargs}, which the schedule {kind.value} does not accept: "
            f"{summarize(error, 'sentence')}. Correct lr_scheduler_kwargs, or choose another lr_scheduler_type."
        ) from error


def check_adapter(model: "ModelConfig", given: Collection[str]) -> None:
    """Raise a RecipeError if a recipe has adapter settings or quantized weights but not `use_peft`.

    `given` contains the names of all settings that the user sets, including those set to their default.
    """
    if model.use_peft:
        return
    settings = [f for f in fields(model) if f.name.startswith("lora_") or f.name in ("use_dora", "use_rslora")]
    values = {f.name: getattr(model, f.name) for f in settings}
    changed = [f.name for f in settings if values[f.name] != f.default or (f.name in given and values[f.name])]
    if changed:
        raise RecipeError(
            f"{changed[0]} is {values[changed[0]]} but use_peft is not set, so all parameters would be trained. Set "
            f"use_peft: true, or drop {', '.join(changed)}."
        )
    if model.load_in_4bit or model.load_in_8bit:
        raise RecipeError(
            "quantized weights cannot be trained (load_in_4bit, load_in_8bit). Set use_peft: true to train an adapter on them, "
            "or drop these settings."
        )
