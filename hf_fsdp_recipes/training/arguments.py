"""The recipes' arguments: TRL's and Trainer's own dataclasses, and the few that this package adds.

A recipe is a YAML of any of these fields; the command line overrides it. Checks what can be checked from the
arguments alone; loads nothing.
"""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import DataError, RecipeError, TemplateError
from hf_fsdp_recipes.export.hub import read_target
from hf_fsdp_recipes.patches import cpu_ranks
from hf_fsdp_recipes.training.feature_checks import check_speed


@dataclass
class RecipeArguments:
    """What this package adds to TRL's arguments."""

    attention: str = field(
        default="auto",
        metadata={
            "help": "Attention: auto takes the fastest one that is installed and says which.",
            "choices": ["auto", "flash", "sdpa", "eager", "flex"],
        },
    )
    config_name: str | None = field(
        default=None,
        metadata={"help": "Train a new model of this config (a directory, a config.json or a Hub id) from scratch."},
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes to that config: hidden_size=768,num_hidden_layers=12."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, where it is not the model's."})
    special_tokens: list[str] | None = field(
        default=None, metadata={"help": "Tokens to add; their embeddings start as the mean of the others."}
    )
    compile_blocks: bool = field(
        default=False,
        metadata={"help": "torch.compile every block of the model by itself (FSDP2); compiling takes minutes once."},
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Check the recipe and show batches and memory; load no weights and train nothing."},
    )
    load_source: str = field(
        default="rank0",
        metadata={
            "help": "Who reads the weights: rank0 (it alone, and sends slices) or direct (each rank its own ranges).",
            "choices": ["rank0", "direct"],
        },
    )
    export: bool = field(
        default=True,
        metadata={"help": "Write the final weights into <output_dir>/export; false for a run that is only measured."},
    )
    export_dtype: str | None = field(
        default=None,
        metadata={"help": "Dtype of the exported weights, bfloat16 say; default: the parameters' own."},
    )
    export_max_shard_size: str = field(
        default="5GB", metadata={"help": "Largest file of the export, as in save_pretrained."}
    )
    merge_adapter: bool = field(
        default=False,
        metadata={"help": "Also write <output_dir>/export_merged: the base model with the LoRA weights in it."},
    )
    adapter_dtype: str = field(
        default="auto",
        metadata={
            "help": "Dtype that adapters train in; auto: float32, under FSDP1 that of the base weights.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )
    verify_export: str = field(
        default="auto",
        metadata={
            "help": "Compare the export's logits with the trained model's: logits, off, or auto (below 3B parameters).",
            "choices": ["auto", "logits", "off"],
        },
    )
    asynchronous_save: bool = field(
        default=True,
        metadata={"help": "Keep training while a checkpoint is written; costs host memory for one copy of the state."},
    )
    prompt_template: str = field(
        default="alpaca",
        metadata={
            "help": "How instruction/input/output rows become prompts: alpaca, or chat (messages).",
            "choices": ["alpaca", "chat"],
        },
    )
    validation_split_percentage: float = field(
        default=0.0,
        metadata={"help": "Percent of the training rows held out for evaluation when there is no test split."},
    )
    add_special_tokens: bool = field(
        default=True, metadata={"help": "Text rows: let the tokenizer add its own tokens, the first one above all."}
    )
    append_concat_token: bool = field(default=True, metadata={"help": "Text rows: end each with the end token."})
    shuffle_buffer_size: int = field(
        default=1000,
        metadata={"help": "Rows of a stream that are shuffled (and packed) together; 0 keeps the order of the files."},
    )
    stopping_strategy: str = field(
        default="first_exhausted",
        metadata={
            "help": "Where a mixture with fractions ends, as in datasets.interleave_datasets; a stream never ends.",
            "choices": ["first_exhausted", "all_exhausted"],
        },
    )
    report: bool = field(
        default=True, metadata={"help": "Write metrics.jsonl, report.md and plots into the output directory."}
    )
    throughput_warmup_steps: int = field(
        default=3, metadata={"help": "First steps that the report's throughput leaves out."}
    )


class Arguments(NamedTuple):
    """Everything a run is told: TRL's script, SFT, model and mixture arguments, and this package's."""

    script: Any
    training: Any
    model: Any
    recipe: RecipeArguments
    mixture: Any


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Read a recipe (`--config X.yaml`) and command-line overrides. Every rank calls this; no collective.

    Turns on FSDP on CPU ranks first, because TrainingArguments starts Accelerate's state.

    Raises:
        RecipeError: an unknown key, a value that a field does not take, or a recipe that is not YAML.
        TemplateError, DataError: arguments that cannot work together.
    """
    cpu_ranks.enable()
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, RecipeArguments, DatasetMixtureConfig))
    parser.set_defaults(**_defaults_from_launch())
    given = list(sys.argv[1:] if argv is None else argv)
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            parsed = parser.parse_args_and_config(given)
    except SystemExit as error:
        if not error.code:
            raise  # --help
        raise RecipeError(complaints.getvalue().strip().splitlines()[-1]) from error
    except OSError as error:
        raise RecipeError(f"the recipe cannot be read: {error}. Remedy: check the path after --config.") from error
    except Exception as error:
        raise RecipeError(f"{_first_line(error)}{_suggest(str(error), parser)}") from error
    arguments = Arguments(*parsed)
    if isinstance(arguments.model.lora_modules_to_save, str):  # one name in YAML; PEFT would take its letters
        arguments.model.lora_modules_to_save = [arguments.model.lora_modules_to_save]
    check_arguments(arguments)
    return arguments


def _defaults_from_launch() -> dict[str, Any]:
    """Let the template decide precision and device where the recipe does not: TRL would say bf16 regardless."""
    defaults: dict[str, Any] = {}
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision is not None:
        defaults |= {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    elif not torch.accelerator.is_available():
        defaults["bf16"] = False
    if cpu_ranks.is_requested() or not torch.accelerator.is_available():
        defaults |= {"use_cpu": True, "dataloader_pin_memory": False}
    return defaults


def check_arguments(arguments: Arguments) -> None:
    """Refuse arguments that would fail, or silently do something else, later on. No collective."""
    check_model_arguments(arguments)
    check_data_arguments(arguments)
    dtype = arguments.recipe.export_dtype
    if dtype is not None and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise RecipeError(
            f"export_dtype: {dtype}. Rule: bfloat16, float16, float32, or nothing for the parameters' own."
        )
    if arguments.recipe.merge_adapter and not arguments.model.use_peft:
        raise RecipeError(
            "merge_adapter without use_peft: there is no adapter to merge. Remedy: drop one or add the other."
        )
    if arguments.recipe.merge_adapter and arguments.model.use_dora:
        raise RecipeError(
            "merge_adapter with use_dora. Rule: LoRA and rsLoRA are merged row by row; DoRA is not. Remedy: merge_adapter: "
            "false, and PEFT's merge_and_unload on the exported adapter."
        )
    check_speed(arguments)
    read_target(arguments.training)
    check_launch(arguments.training)


def check_model_arguments(arguments: Arguments) -> None:
    """Refuse model arguments that cannot work together. No collective.

    Raises:
        RecipeError: no model or two, or a new model without what it needs.
    """
    name, recipe = arguments.model.model_name_or_path, arguments.recipe
    if (name is None) == (recipe.config_name is None):
        raise RecipeError(
            f"model_name_or_path: {name}, config_name: {recipe.config_name}. Rule: one of them, a model to fine-tune (a "
            f"directory or Hub id) or the config of a new one. Remedy: add it to the recipe."
        )
    if recipe.config_name is None:
        if recipe.config_overrides is not None:
            raise RecipeError("config_overrides changes a new model's config. Remedy: name one in config_name.")
        return
    if recipe.tokenizer_name is None:
        raise RecipeError("a new model (config_name) needs tokenizer_name, a directory or Hub id with a tokenizer.")
    if arguments.model.use_peft or arguments.model.load_in_4bit:
        raise RecipeError("a new model (config_name) has nothing to adapt or quantise. Remedy: drop use_peft.")


def check_data_arguments(arguments: Arguments) -> None:
    """Refuse data arguments that cannot work together. No collective.

    Raises:
        DataError: no dataset, percentages or fractions that are none, or a stream without max_steps.
    """
    script, training, recipe, mixture = arguments.script, arguments.training, arguments.recipe, arguments.mixture
    if script.dataset_name is None and not mixture.datasets:
        raise DataError(
            "no dataset. Rule: dataset_name is a Hub id, a file or a folder (or datasets, a list of them). Remedy: add it to "
            "the recipe."
        )
    if not 0 <= recipe.validation_split_percentage < 100:
        raise DataError(f"validation_split_percentage: {recipe.validation_split_percentage}. Rule: 0 to below 100.")
    fractions = [part.fraction for part in mixture.datasets if part.fraction is not None]
    if fractions and (len(fractions) < len(mixture.datasets) or min(fractions) <= 0):
        raise DataError(f"fractions of datasets: {fractions}. Rule: a positive number for every part, or for none.")
    if not is_streaming(arguments):
        return
    if training.max_steps <= 0:
        raise DataError("a stream has no end and max_steps is not set. Remedy: max_steps, or dataset_streaming: false.")
    if len(mixture.datasets) > 1 and not fractions:
        raise DataError("streams are mixed by their shares. Remedy: give each part of datasets a fraction.")
    if recipe.shuffle_buffer_size < 0:
        raise DataError(f"shuffle_buffer_size: {recipe.shuffle_buffer_size}. Rule: rows, or 0.")


def is_streaming(arguments: Any) -> bool:
    """Tell whether rows are read while training; a mixture has a field of its own for that, TRL's `streaming`."""
    return bool(arguments.mixture.streaming if arguments.mixture.datasets else arguments.script.dataset_streaming)


def check_launch(training: Any) -> None:
    """Refuse a launch whose ranks would not train one model together. No collective.

    Raises:
        TemplateError: several ranks without FSDP, or ranks that do not know of each other.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and training.world_size != launched:
        raise TemplateError(
            f"{launched} ranks were launched and each believes to be one of {training.world_size}. Rule: they train one "
            f"model. Remedy: launch with a template of accelerate_configs/ (accelerate launch --config_file ...)."
        )
    if launched > 1 and not is_true(os.environ.get("ACCELERATE_USE_FSDP", "false")):
        raise TemplateError(
            f"{launched} ranks were launched without FSDP. Rule: the recipes shard. Remedy: accelerate launch --config_file "
            f"accelerate_configs/fsdp2_full_shard.yaml (fsdp2_cpu.yaml without a GPU), or distributed_type: FSDP in yours."
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _suggest(message: str, parser: Any) -> str:
    """Name the nearest known argument where the message quotes an unknown one."""
    import re
    from difflib import get_close_matches

    known = [action.dest for action in parser._actions]
    for word in re.findall(r"'-*([A-Za-z_]\w+)'?", message):
        close = get_close_matches(word, known, n=1)
        if word not in known and close:
            return f" Remedy: did you mean {close[0]}?"
    return ""
