"""The arguments of a recipe: the fields of TRL's and Trainer's dataclasses, and those that this package adds.

A recipe is a YAML file that sets any of these fields; the command line overrides the recipe. Arguments are checked here, before
anything is loaded.
"""

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch

from hf_fsdp_recipes.configs.launch import check_launch
from hf_fsdp_recipes.configs.shipped_files import PATH_FIELDS, find_file
from hf_fsdp_recipes.environment import fsdp_version, mixed_precision
from hf_fsdp_recipes.errors import DataError, RecipeError, TemplateError, first_sentence, summarize
from hf_fsdp_recipes.export.export_directory import parse_shard_size
from hf_fsdp_recipes.export.hub import read_target
from hf_fsdp_recipes.patches import cpu_ranks
from hf_fsdp_recipes.training.feature_checks import check_features
from hf_fsdp_recipes.training.trainers import KINDS, check_trainer, find_kind
from hf_fsdp_recipes.training.value_checks import (
    check_adapter,
    check_numbers,
    check_recipe,
    check_scheduler,
    name_settings,
)

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser


PREPARED_FILE = "prepared.json"  # describes a directory of prepared rows
PARSE_ADVICE = "Correct the recipe or the command line; docs/reference.md lists the arguments."
Default = TypeVar("Default")


def _argument(default: Default, help_text: str) -> Default:
    return field(default=default, metadata={"help": help_text})


@dataclass
class RecipeArguments:
    """The arguments that this package adds to TRL's."""

    attention: Literal["auto", "flash", "sdpa", "eager", "flex"] = _argument(
        "auto",
        "Attention implementation. auto uses the newest FlashAttention that is installed. If there is none, packed documents "
        "on a GPU use FlashAttention 2 from the Hub, or else flex; anything else uses the model's default. flash may also use "
        "the Hub. The Hub is used only if the kernels package is installed.",
    )
    config_name: str | None = _argument(
        None,
        "Config of a new model to train from scratch, instead of model_name_or_path; a directory, a config.json or a Hub id.",
    )
    config_overrides: str | None = _argument(
        None, "Changes to the config of the new model, such as hidden_size=768,num_hidden_layers=12."
    )
    tokenizer_name: str | None = _argument(
        None, "Directory or Hub id of the tokenizer, if it is not the model's own; required with config_name."
    )
    special_tokens: list[str] | None = field(
        default=None,
        metadata={"help": "Special tokens to add; their embeddings start as the mean of the existing ones."},
    )
    compile_blocks: bool = _argument(
        False,
        "Compile each transformer block separately with torch.compile (FSDP2 only); adds minutes to the first steps.",
    )
    dry_run: bool = _argument(
        False, "Check the recipe and print batch sizes and memory, without loading weights or training."
    )
    load_source: Literal["rank0", "direct", "auto"] = _argument(
        "rank0",
        "Which ranks read the weights: with rank0, rank 0 reads and sends each rank its shard; with direct, each rank reads its "
        "own; auto is direct if every rank sees the files, else rank0.",
    )
    export: bool = _argument(
        True, "Write the final weights to <output_dir>/export; turn it off for runs that are only measured."
    )
    export_dtype: str | None = _argument(
        None, "Dtype of the exported weights, such as bfloat16; by default the dtype of the trained parameters."
    )
    export_max_shard_size: str = _argument("5GB", "Maximum size of one exported file, as in save_pretrained.")
    merge_adapter: bool = _argument(
        False, "Also write <output_dir>/export_merged, the base model with the LoRA weights merged in."
    )
    adapter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _argument(
        "auto", "Dtype in which adapters train; auto is float32, but under FSDP1 the dtype of the base weights."
    )
    reduce_dtype: Literal["float32", "bfloat16"] = _argument(
        "float32",
        "Dtype in which ranks add their gradients in mixed precision; bfloat16 halves communication but keeps only 8 bits of "
        "precision.",
    )
    verify_export: Literal["auto", "logits", "off"] = _argument(
        "auto", "Compare the export's logits with the trained model's; auto does so below 3 billion parameters."
    )
    asynchronous_save: bool = _argument(
        True,
        "Write checkpoints in the background while training continues; each rank needs host memory for a copy of its state.",
    )
    prompt_template: Literal["alpaca", "chat"] = _argument(
        "alpaca", "Format for instruction/input/output rows; alpaca makes a text prompt, chat makes messages."
    )
    validation_split_percentage: float = _argument(
        0.0, "Percentage of the training rows to hold out for evaluation if there is no test split."
    )
    add_special_tokens: bool = _argument(
        True, "Let the tokenizer add its special tokens, such as a beginning-of-sequence token, to text rows."
    )
    append_concat_token: bool = _argument(True, "Append the end-of-sequence token to each text row.")
    shuffle_buffer_size: int = _argument(
        1000,
        "Number of streamed rows to shuffle and pack together; with 0, rows are packed 1000 at a time and not shuffled. In either "
        "case, `datasets` reorders the files in each pass after the first.",
    )
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = _argument(
        "first_exhausted",
        "When a mixture with fractions ends, as in datasets.interleave_datasets; ignored for streams, which never end.",
    )
    previous_run: Literal["refuse", "archive"] = _argument(
        "refuse",
        "If output_dir holds checkpoints or an export of another run: refuse to start, or archive them in "
        "<output_dir>/previous-<n>.",
    )
    checkpoint_mirror: str | None = _argument(
        None,
        "Where to upload complete checkpoints and the export while training continues: a URL such as s3://bucket/run (needs "
        "hf-fsdp-recipes[mirror]), or a path.",
    )
    report: bool = _argument(True, "Write metrics.jsonl, report.md and plots to the output directory.")
    throughput_warmup_steps: int = _argument(3, "Number of first steps to exclude from the reported throughput.")


class Arguments(NamedTuple):
    """All arguments of a run: TRL's arguments for script, trainer, model and dataset mixture, and those of this package."""

    script: "ScriptArguments"
    training: "SFTConfig"  # or another trainer's config, which lacks some of SFTConfig's fields
    model: "ModelConfig"
    recipe: RecipeArguments
    mixture: "DatasetMixtureConfig"


def parse_arguments(argv: Sequence[str] | None = None, trainer: str = "sft") -> Arguments:
    """Read a recipe (`--config X.yaml`) and command-line overrides, and check them.

    `trainer` is a key of `KINDS` in trainers.py. Every rank calls this, but it is not a collective. Raises a RecipeError or a
    subclass that says what is wrong.
    """
    cpu_ranks.enable()  # before TrainingArguments initializes Accelerate's state
    argv = list(sys.argv[1:] if argv is None else argv)
    # Import TRL after `enable`: TRL imports bitsandbytes, which would otherwise print a message on every CPU rank.
    import trl
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
    from trl.scripts.grpo import GRPOScriptArguments

    script_class = GRPOScriptArguments if trainer == "grpo" else ScriptArguments
    config_class = getattr(trl, f"{KINDS[trainer].title}Config")
    classes = (script_class, config_class, ModelConfig, RecipeArguments, DatasetMixtureConfig)
    values = {name.lstrip("-"): value for name, value in itertools.pairwise(argv) if name.startswith("--")}
    recipe: dict[str, Any] = {}
    if "config" in values:
        argv[argv.index("--config") + 1] = str(find_file("recipes", values["config"]))
        recipe = check_recipe(values["config"], classes)
        values = recipe | values
    parser = TrlParser(classes)
    parser.allow_abbrev = False  # otherwise --model_name sets model_name_or_path, and the recipe then overwrites it
    parser.set_defaults(**_launcher_defaults())
    usage_errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage_errors):
            parsed = parser.parse_args_and_config(argv)
    except SystemExit as error:
        if not error.code:
            raise  # --help
        reason = usage_errors.getvalue().strip().splitlines()[-1].rpartition("error: ")[2]
        raise RecipeError(f"{reason.rstrip('.')}. {PARSE_ADVICE}") from error
    except torch.distributed.DistError as error:
        raise RecipeError(
            f"the ranks cannot reach each other: {summarize(error, 'line').rstrip('.')}. Check that every rank was started, "
            f"that main_process_port is free, and that no firewall is between the nodes."
        ) from error
    except Exception as error:
        line = first_sentence(summarize(error, "line"))
        reason = f"{name_settings(line, values)}{line}.{_suggest_name(str(error), parser)}"
        raise RecipeError(f"{reason} {PARSE_ADVICE}") from error
    arguments = Arguments(*parsed)
    # Set the recipe's paths to where `read_recipe` found the files; TRL would use them exactly as the recipe spells them.
    from_recipe = {name: value for name, value in recipe.items() if name not in _flag_names(argv)}
    for part in arguments:
        vars(part).update(
            {name: from_recipe[name] for name in PATH_FIELDS if name in from_recipe and hasattr(part, name)}
        )
    for dataset, entry in zip(arguments.mixture.datasets, from_recipe.get("datasets") or (), strict=False):
        dataset.path = entry["path"]
    model = arguments.model
    for field_name in ("lora_modules_to_save", "lora_target_parameters"):
        # A recipe may give a single name as a string, and PEFT would iterate over its letters.
        if isinstance(getattr(model, field_name), str):
            setattr(model, field_name, [getattr(model, field_name)])
    if isinstance(model.lora_target_modules, str) and model.lora_target_modules.isidentifier():
        # TRL replaces a list of one name with the name, which PEFT would treat as a regular expression.
        model.lora_target_modules = [model.lora_target_modules]
    # The tokenizer, merges and GRPO's reference model need the revision too.
    model.model_revision = (arguments.training.model_init_kwargs or {}).get("revision") or model.model_revision
    if arguments.training.dataloader_pin_memory and "accelerator_config" not in values:
        # Batches are copied to the device while the host continues.
        arguments.training.accelerator_config.non_blocking = True
    check_arguments(arguments, values.keys() | _flag_names(argv))
    return arguments


def _flag_names(argv: Sequence[str]) -> set[str]:
    return {text[2:].partition("=")[0].replace("-", "_") for text in argv if text.startswith("--")}


def _launcher_defaults() -> dict[str, bool]:
    """Return the template's precision and device as defaults for the recipe, because TRL would always default to bf16."""
    defaults = {"logging_nan_inf_filter": False}  # the filter would copy every loss to the host
    precision = mixed_precision()
    if precision is not None:
        defaults |= {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    elif not torch.accelerator.is_available():
        defaults["bf16"] = False
    if cpu_ranks.is_requested() or not torch.accelerator.is_available():
        defaults |= {"use_cpu": True, "dataloader_pin_memory": False}
    return defaults


def _suggest_name(message: str, parser: "TrlParser") -> str:
    known = [action.dest for action in parser._actions]
    for name in re.findall(r"'-*([A-Za-z_]\w+)'?", message) if "argument" in message else ():
        close = get_close_matches(name, known, n=1)
        if name not in known and close:
            return f" Did you mean {close[0]}?"
    return ""


def check_arguments(arguments: Arguments, given: Collection[str]) -> None:
    """Raise an error for arguments that would fail later or be silently ignored. Not a collective.

    `given` contains the names of the arguments that the recipe or the command line sets.
    """
    check_numbers(vars(arguments.training) | vars(arguments.model) | vars(arguments.recipe))
    if not arguments.training.output_dir:
        raise RecipeError("output_dir is empty. Set it to the directory of the run.")
    check_trainer(arguments, given)
    check_scheduler(arguments.training)
    _check_model(arguments)
    check_adapter(arguments.model, given)
    if arguments.recipe.adapter_dtype != "auto" and not arguments.model.use_peft:
        raise RecipeError(
            f"adapter_dtype is {arguments.recipe.adapter_dtype}, but there is no adapter. Set use_peft: true, or drop "
            f"adapter_dtype."
        )
    _check_data(arguments)
    _check_export(arguments)
    check_features(arguments)
    training, precision = arguments.training, mixed_precision()
    if precision in ("bf16", "fp16") and precision in given and not (training.bf16 or training.fp16):
        raise TemplateError(
            f"{precision} is false, but the launch sets mixed_precision: {precision}, which Trainer would use. Launch with "
            f"--mixed_precision no, or drop {precision}."
        )
    read_target(arguments.training, needs_access=not arguments.recipe.dry_run)
    check_launch(arguments.training)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and fsdp_version() is None:
        raise TemplateError(
            f"{launched} ranks were launched without FSDP, which the recipes need. Use hf-fsdp "
            f"{find_kind(arguments.training).name} --accelerate_config fsdp2_full_shard (fsdp2_cpu without a GPU), or set "
            f"distributed_type: FSDP in your Accelerate config."
        )


def _check_model(arguments: Arguments) -> None:
    name, recipe = arguments.model.model_name_or_path, arguments.recipe
    if (name is None) == (recipe.config_name is None):
        raise RecipeError(
            f"model_name_or_path is {name} and config_name is {recipe.config_name}. Set exactly one: a model to fine-tune, or "
            f"the config of a new one."
        )
    if recipe.config_name is None:
        if recipe.config_overrides is not None:
            raise RecipeError(
                "config_overrides applies only to a new model. Set config_name, or drop config_overrides."
            )
        return
    if recipe.tokenizer_name is None:
        raise RecipeError("a new model (config_name) needs a tokenizer. Set tokenizer_name to a directory or Hub id.")
    if arguments.model.use_peft or arguments.model.load_in_4bit:
        raise RecipeError(
            "a new model (config_name) cannot use adapters or 4-bit weights. Drop use_peft and load_in_4bit."
        )
    if ignored := (arguments.training.model_init_kwargs or {}).keys() - {"auto_class", "experts_implementation"}:
        keys = ", ".join(sorted(ignored))
        raise RecipeError(
            f"model_init_kwargs: {keys} does not apply to a new model (config_name). Drop {keys}, or use config_overrides to "
            f"change fields of the config."
        )


def _check_data(arguments: Arguments) -> None:
    script, training, recipe, mixture = arguments.script, arguments.training, arguments.recipe, arguments.mixture
    if script.dataset_name is None and not mixture.datasets:
        raise DataError(
            "there is no dataset. Set dataset_name to a Hub id, file or directory, or datasets to a list of them."
        )
    if script.dataset_name is not None and mixture.datasets and not is_prepared(script.dataset_name):
        raise DataError(
            f"dataset_name is {script.dataset_name}, but the recipe's datasets would be used instead. Drop one of the two."
        )
    if mixture.datasets and script.dataset_streaming:
        raise DataError("dataset_streaming has no effect on datasets. Set streaming instead.")
    if mixture.streaming and not mixture.datasets:
        raise DataError("streaming has no effect without datasets. Set dataset_streaming instead.")
    if not 0 <= recipe.validation_split_percentage < 100:
        raise DataError(
            f"validation_split_percentage is {recipe.validation_split_percentage}. Choose a value from 0 to below 100."
        )
    if getattr(training, "packing", False) and training.max_length is None:
        raise DataError("packing: true needs a sequence length. Set max_length.")
    if getattr(training, "eval_packing", False) and not training.packing and not training.padding_free:
        raise DataError(
            "eval_packing: true needs packing: true; otherwise packed documents would attend to each other. Set packing: true, or "
            "drop eval_packing."
        )
    fractions = [part.fraction for part in mixture.datasets if part.fraction is not None]
    if fractions and (len(fractions) < len(mixture.datasets) or min(fractions) <= 0):
        raise DataError(
            f"the fractions in datasets are {fractions}. Give every part a positive fraction, or none of them."
        )
    if not is_streaming(arguments):
        return
    if training.max_steps <= 0:
        setting = "streaming" if mixture.datasets else "dataset_streaming"
        raise DataError(f"a stream has no end, so max_steps is required. Set max_steps, or set {setting}: false.")
    if len(mixture.datasets) > 1 and not fractions:
        raise DataError("streams are mixed by fraction. Give each part of datasets a fraction.")


def is_prepared(name: str | None) -> bool:
    """Return whether a dataset name is a directory of prepared rows, which `hf-fsdp prepare-data` has written."""
    return name is not None and (Path(name) / PREPARED_FILE).is_file()


def is_streaming(arguments: Arguments) -> bool:
    """Return whether rows are streamed during training. For mixtures, TRL has a separate field, `streaming`."""
    return bool(arguments.mixture.streaming if arguments.mixture.datasets else arguments.script.dataset_streaming)


def _check_export(arguments: Arguments) -> None:
    recipe, model = arguments.recipe, arguments.model
    parse_shard_size(recipe.export_max_shard_size, "export_max_shard_size")
    dtype = recipe.export_dtype
    if dtype is not None and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise RecipeError(f"export_dtype is {dtype}. Set bfloat16, float16 or float32, or drop it.")
    if recipe.merge_adapter and not model.use_peft:
        raise RecipeError("merge_adapter needs an adapter. Set use_peft: true, or drop merge_adapter.")
