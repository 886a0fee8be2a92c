"""Parses a recipe's arguments: TRL's own and those of `RecipeArguments`.

They come from a YAML file and the command line.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from hf_fsdp_recipes.errors import RecipeError, explained
from hf_fsdp_recipes.settings import Settings, read_settings
from hf_fsdp_recipes.upstream.patches import are_cpu_ranks_requested

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

OPTION = re.compile(r"--([\w-]+)")
# Fields that may hold a path relative to the recipe's own file.
PATHS = (
    "model_name_or_path",
    "dataset_name",
    "config_name",
    "tokenizer_name",
    "chat_template_path",
)


def _field(default: object, text: str) -> Any:
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
    given: Collection[str] = ()  # names of those that the recipe or the command line sets

    @property
    def is_streamed(self) -> bool:
        """Whether the dataset is a stream, whose rows are read during training."""
        return self.mixture.streaming or self.script.dataset_streaming


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Return the arguments from a command line and from the recipe that `--config` names.

    Not a collective. Raises a RecipeError if the recipe cannot be read, or if an argument is
    unknown or has an invalid value.
    """
    parser = _build_parser()
    actions = {action.dest: action for action in parser._actions}
    recipe: Settings = {}
    if "--config" in words[:-1]:
        recipe = read_recipe(Path(words[words.index("--config") + 1]))
    names = [match[1].replace("-", "_") for match in map(OPTION.match, words) if match]
    given = [*map(str, recipe), *names]
    for name in given:
        if name not in {*actions, "config", "env"}:
            close = " or ".join(get_close_matches(name, actions, 2))
            ending = f"; did you mean {close}?" if close else "."
            raise RecipeError(f"{name} is not an argument{ending}")
    # argparse checks texts, numbers and choices if they are options. TRL would take those of a
    # recipe as they are.
    options = [
        f"--{name}={value}"
        for name, value in recipe.items()
        if name in actions
        and value is not None
        and (isinstance(value, str) or actions[name].choices or actions[name].type in (int, float))
    ]
    with explained(RecipeError, "an argument is refused"):  # by the classes' own checks
        arguments = Arguments(*parser.parse_args_and_config([*options, *words]))
    arguments.given = given
    return arguments


def _build_parser() -> "TrlParser":
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            # argparse would print a page of usage.
            raise RecipeError(shorten(f"{message}.", 600))

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
    precision = os.getenv("ACCELERATE_MIXED_PRECISION")
    parser.set_defaults(
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        log_level_replica="error",  # rank 0 gives the same warnings
    )
    if are_cpu_ranks_requested():
        parser.set_defaults(use_cpu=True, dataloader_pin_memory=False)
    return parser


def read_recipe(file: Path) -> Settings:
    """Return a recipe's fields. Paths that exist only beside the recipe begin with its directory.

    Raises a RecipeError if the file is unreadable, is no YAML mapping, or sets a field twice.
    """
    recipe = read_settings(file)
    for name, value in recipe.items():
        beside = file.parent / str(value)
        if name in PATHS and not Path(str(value)).exists() and beside.exists():
            recipe[name] = str(beside)
    return recipe
