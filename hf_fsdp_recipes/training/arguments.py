"""Parses a recipe's arguments: TRL's own and those of `RecipeArguments`. They come from a YAML file and the command line."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import yaml

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.upstream.patches import are_cpu_ranks_requested

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

# Fields that may hold a path relative to the recipe's own file.
PATHS = (
    "model_name_or_path",
    "dataset_name",
    "config_name",
    "tokenizer_name",
    "chat_template_path",
)


def _help(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RecipeArguments:
    """The recipe arguments that this package adds to TRL's."""

    config_name: str | None = _help(
        "Config of a new model with random weights, instead of model_name_or_path."
    )
    config_overrides: str | None = _help(
        "Changes to it, such as hidden_size=768,num_hidden_layers=12."
    )
    tokenizer_name: str | None = _help("Tokenizer, if it is not the model's own.")
    prompt_format: Literal["alpaca", "chat"] = _help(
        "Text for rows of instruction, input and output.", "chat"
    )
    validation_split_percentage: float = _help(
        "Percentage of rows to hold out if there is no test split.", 0.0
    )
    export: bool = _help("Export the trained model to <output_dir>/export.", True)
    export_dtype: str | None = _help(
        "Dtype of the exported weights; default: that of the trained ones."
    )
    merge_adapter: bool = _help(
        "Also export the base model with the adapter merged in, to export_merged/.", False
    )
    throughput_warmup_steps: int = _help(
        "Steps after a start that do not count in the average throughput.", 3
    )


@dataclass
class Arguments:
    """All arguments of a recipe. Each field holds those that one class defines."""

    script: "ScriptArguments"
    training: "SFTConfig"
    model: "ModelConfig"
    mixture: "DatasetMixtureConfig"
    recipe: RecipeArguments

    @property
    def is_streamed(self) -> bool:
        """Whether the dataset is a stream, whose rows are read during training."""
        return self.mixture.streaming if self.mixture.datasets else self.script.dataset_streaming


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Return the arguments from the command line and from the recipe that `--config` names. Not a collective.

    Raises a RecipeError if the recipe cannot be read, or if an argument is unknown or has an invalid value.
    """
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = TrlParser(
        (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig, RecipeArguments)
    )
    parser.allow_abbrev = False
    parser.error = _refuse  # argparse would print a page of usage
    precision = os.environ.get(
        "ACCELERATE_MIXED_PRECISION", "no"
    )  # set by the launcher; TRL would take bf16
    parser.set_defaults(bf16=precision == "bf16", fp16=precision == "fp16")
    if are_cpu_ranks_requested():
        parser.set_defaults(use_cpu=True, dataloader_pin_memory=False)
    file = (
        Path(arguments[arguments.index("--config") + 1]) if "--config" in arguments[:-1] else None
    )
    recipe = read_recipe(file) if file else {}
    given = {*re.findall(r"(?:^|\n)--([\w-]+)", "\n".join(arguments)), *recipe} - {
        "config",
        "help",
        "env",
    }
    actions = {action.dest: action for action in parser._actions}
    if wrong := [
        *filter(None, (_find_fault(name, recipe.get(name), actions) for name in sorted(given)))
    ]:
        raise RecipeError(" ".join(wrong))
    try:
        found = Arguments(*parser.parse_args_and_config(arguments))
    except (ValueError, TypeError, ImportError) as error:  # raised by the classes' own checks
        raise RecipeError(f"an argument is refused: {' '.join(str(error).split())}") from error
    if file:
        _find_relative_paths(found, file.parent)
    return found


def read_recipe(file: Path) -> dict[str, Any]:
    """Return a recipe's fields. Raise a RecipeError if the file is unreadable, is no YAML mapping, or sets a field twice."""
    try:
        text = file.read_text()
        recipe = yaml.safe_load(text)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"the recipe {file} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"the recipe {file} is no list of `name: value` lines.")
    node: Any = yaml.compose(text, yaml.SafeLoader)
    names = [name.value for name, _ in node.value]
    if repeated := next(
        (name for name in recipe if names.count(name) > 1), None
    ):  # YAML would use the last value
        raise RecipeError(f"{repeated} is set twice in the recipe {file}. Remove one of the two.")
    return recipe


def _refuse(message: str) -> NoReturn:
    raise RecipeError(f"{message}.")


def _find_fault(name: str, value: Any, actions: dict[str, Any]) -> str | None:
    """Return a message if no argument has this name, or if its value in the YAML file is invalid. Otherwise return None."""
    action = actions.get(name.replace("-", "_"))
    if action is None:
        close = " or ".join(get_close_matches(name, actions, 2))
        return f"{name} is not an argument{f'; did you mean {close}?' if close else '.'}"
    if action.choices and value not in (None, *action.choices):
        known = [str(choice) for choice in action.choices]
        return f"{name} is {value!r}. Set one of {', '.join(get_close_matches(str(value), known) or known)}."
    kinds: Any = {int: int, float: (int, float)}.get(
        action.type
    )  # argparse itself checks values that are text
    if kinds and action.nargs is None and value is not None and not isinstance(value, (str, kinds)):
        return f"{name} is {value!r}. Set {'a whole number' if kinds is int else 'a number'}."
    return None


def _find_relative_paths(arguments: Arguments, directory: Path) -> None:
    """Resolve paths in a recipe against its directory if they exist only there."""
    for part in vars(arguments).values():
        for name in PATHS:
            value = getattr(part, name, None)
            if value and not Path(value).exists() and (directory / value).exists():
                setattr(part, name, str(directory / value))
