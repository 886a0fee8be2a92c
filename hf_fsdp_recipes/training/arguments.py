"""Parses a recipe: TRL's own arguments and a few more, from a YAML file and the command line."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from hf_fsdp_recipes import patches
from hf_fsdp_recipes.errors import RecipeError

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

# Fields that may hold a path relative to the recipe's own file.
PATHS = ("model_name_or_path", "dataset_name", "config_name", "tokenizer_name", "chat_template_path")


@dataclass
class RecipeArguments:
    """The arguments that recipes add to TRL's."""

    config_name: str | None = field(
        default=None, metadata={"help": "Config of a new model with random weights, instead of model_name_or_path."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes to it, such as hidden_size=768,num_hidden_layers=12."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if it is not the model's own."})
    prompt_format: Literal["alpaca", "chat"] = field(
        default="chat", metadata={"help": "Text for rows with the columns instruction, input and output."}
    )
    validation_split_percentage: float = field(
        default=0.0, metadata={"help": "Percentage of the rows to hold out for evaluation if there is no test split."}
    )
    export: bool = field(default=True, metadata={"help": "Export the trained model to <output_dir>/export."})
    export_dtype: str | None = field(
        default=None, metadata={"help": "Dtype of the exported weights; default: that of the trained ones."}
    )
    merge_adapter: bool = field(
        default=False, metadata={"help": "Also export the base model with the adapter merged in, to export_merged/."}
    )
    throughput_warmup_steps: int = field(
        default=3, metadata={"help": "Steps after a start that do not count in the average throughput."}
    )


@dataclass
class Arguments:
    """All arguments of a recipe, by the class that defines them."""

    script: "ScriptArguments"
    training: "SFTConfig"
    model: "ModelConfig"
    mixture: "DatasetMixtureConfig"
    recipe: RecipeArguments


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Return the arguments of the command line and of the recipe that `--config` names. Not a collective.

    Raises:
        RecipeError: the recipe cannot be read, or an argument is unknown; the message suggests the nearest name.
    """
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig, RecipeArguments))
    parser.allow_abbrev = False
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # of the launch; TRL's default is bf16
    parser.set_defaults(bf16=precision == "bf16", fp16=precision == "fp16")
    if patches.are_cpu_ranks_requested():
        parser.set_defaults(use_cpu=True, dataloader_pin_memory=False)
    known = [action.dest for action in parser._actions]
    given = set(re.findall(r"(?:^|\n)--([\w-]+)", "\n".join(arguments))) - {"config", "help"}
    recipe = Path(arguments[arguments.index("--config") + 1]) if "--config" in arguments[:-1] else None
    given |= set(read_recipe(recipe)) - {"env"} if recipe else set()
    if unknown := sorted(name for name in given if name.replace("-", "_") not in known):
        raise RecipeError(" ".join(_suggest(name, known) for name in unknown))
    found = Arguments(*parser.parse_args_and_config(arguments))
    if recipe:
        _find_relative_paths(found, recipe.parent)
    return found


def read_recipe(path: Path) -> dict[str, object]:
    """Return a recipe's fields; raise a RecipeError if the file cannot be read. Not a collective."""
    try:
        recipe = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"the recipe {path} is no list of `name: value` lines.")
    return recipe


def _suggest(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, 1)
    return f"{name} is not an argument{f'; did you mean {close[0]}?' if close else '.'}"


def _find_relative_paths(arguments: Arguments, directory: Path) -> None:
    """Let paths in a recipe be relative to its file."""
    for part in vars(arguments).values():
        for name in PATHS:
            value = getattr(part, name, None)
            if value and not Path(value).exists() and (directory / value).exists():
                setattr(part, name, str(directory / value))
