"""Parses a recipe's arguments: TRL's own and those of `RecipeArguments`.

They come from a YAML file and the command line.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from hf_fsdp_recipes.errors import RecipeError, explained
from hf_fsdp_recipes.settings import read_settings
from hf_fsdp_recipes.upstream.patches import are_cpu_ranks_requested

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

T = TypeVar("T")

# Fields that may hold a path relative to the recipe's own file.
PATHS = (
    "model_name_or_path",
    "dataset_name",
    "config_name",
    "tokenizer_name",
    "chat_template_path",
)


def _field(default: T, text: str) -> T:
    return field(default=default, metadata={"help": text})


@dataclass
class RecipeArguments:
    """The recipe arguments that this package adds to TRL's."""

    config_name: str | None = _field(
        None, "Config of a new model with random weights, instead of model_name_or_path."
    )
    config_overrides: str | None = _field(
        None, "Changes to it, such as hidden_size=768,num_hidden_layers=12."
    )
    tokenizer_name: str | None = _field(None, "Tokenizer, if it is not the model's own.")
    prompt_format: Literal["alpaca", "chat"] = _field(
        "chat", "Text for rows of instruction, input and output."
    )
    validation_split_percentage: float = _field(
        0.0, "Percentage of rows to hold out if there is no test split."
    )
    export: bool = _field(True, "Export the trained model to <output_dir>/export.")
    export_dtype: str | None = _field(
        None, "Dtype of the exported weights; default: that of the trained ones."
    )
    merge_adapter: bool = _field(
        False, "Also export the base model with the adapter merged in, to export_merged/."
    )
    throughput_warmup_steps: int = _field(
        3, "Steps after a start that do not count in the average throughput."
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
    """Return the arguments from the command line and from the recipe that `--config` names.

    Not a collective. Raises a RecipeError if the recipe cannot be read, or if an argument is
    unknown or has an invalid value.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    recipe = {}
    file = None
    if "--config" in words[:-1]:
        file = Path(words[words.index("--config") + 1])
        recipe = read_settings(file)
    names = set(recipe)
    for word in words:
        names.update(re.findall(r"^--([\w-]+)", word))
    parser = _build_parser()
    actions = {action.dest: action for action in parser._actions}
    mistakes: list[str] = []
    for name in sorted(names - {"config", "help", "env"}):
        mistakes += _find_mistakes(name, recipe.get(name), actions)
    if mistakes:
        raise RecipeError(" ".join(mistakes))
    with explained(RecipeError, "an argument is refused"):  # by the classes' own checks
        arguments = Arguments(*parser.parse_args_and_config(words))
    if file:
        _find_relative_paths(arguments, file.parent)
    return arguments


def _build_parser() -> "TrlParser":
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            raise RecipeError(f"{message}.")  # argparse would print a page of usage

    parser = Parser(
        (  # type: ignore[arg-type]  # asks for one class
            ScriptArguments,
            SFTConfig,
            ModelConfig,
            DatasetMixtureConfig,
            RecipeArguments,
        ),
        allow_abbrev=False,
    )
    # Set by the launcher. TRL would take bf16.
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    parser.set_defaults(
        bf16=precision == "bf16",
        fp16=precision == "fp16",
    )
    if are_cpu_ranks_requested():
        parser.set_defaults(use_cpu=True, dataloader_pin_memory=False)
    return parser


def _find_mistakes(
    name: str,
    value: object,
    actions: dict[str, argparse.Action],
) -> Iterator[str]:
    """Yield a message if no argument has this name, or if its value in the recipe is invalid.

    The value is None if the recipe has none. Values on the command line are checked by argparse.
    """
    action = actions.get(name.replace("-", "_"))
    if action is None:
        close = " or ".join(get_close_matches(name, actions, 2))
        ending = f"; did you mean {close}?" if close else "."
        yield f"{name} is not an argument{ending}"
    elif value is not None and action.choices and value not in action.choices:
        known = [str(choice) for choice in action.choices]
        listed = ", ".join(get_close_matches(str(value), known) or known)
        yield f"{name} is {value!r}. Set one of {listed}."
    elif value is None or isinstance(value, str) or action.nargs is not None:
        return  # argparse itself checks text
    elif action.type is int and not isinstance(value, int):
        yield f"{name} is {value!r}. Set a whole number."
    elif action.type is float and not isinstance(value, int | float):
        yield f"{name} is {value!r}. Set a number."


def _find_relative_paths(arguments: Arguments, directory: Path) -> None:
    """Resolve paths in a recipe against its directory if they exist only there."""
    for part in vars(arguments).values():
        for name in PATHS:
            value = getattr(part, name, None)
            if value and not Path(value).exists() and (directory / value).exists():
                setattr(part, name, str(directory / value))
