"""Checks a recipe before anything is loaded: only what upstream would do in silence, find too late, or not name."""

import math
import os
from typing import TYPE_CHECKING

from hf_fsdp_recipes import distributed, patches
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training.sharded_optimizer import SHARDABLE, is_bitsandbytes_optimizer, optimizer_name

if TYPE_CHECKING:
    from hf_fsdp_recipes.training.arguments import Arguments

LORA_FIELDS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save")


def check_arguments(arguments: "Arguments") -> None:
    """Raise a RecipeError that lists everything wrong with a recipe. Not a collective; every rank finds the same."""
    found = [message for is_wrong, message in _list_checks(arguments) if is_wrong]
    if found:
        raise RecipeError(" ".join(found))


def _list_checks(arguments: "Arguments") -> list[tuple[bool, str]]:
    """Return (whether something is wrong, what to say about it)."""
    return [*_check_values(arguments), *_check_choices(arguments), *_check_launch(arguments)]


def _check_values(arguments: "Arguments") -> list[tuple[bool, str]]:
    training, recipe = arguments.training, arguments.recipe
    accumulation, percentage = training.gradient_accumulation_steps, recipe.validation_split_percentage
    return [
        (not training.output_dir, "output_dir is empty. Name a directory for checkpoints and the export."),
        (accumulation < 1, f"gradient_accumulation_steps is {accumulation}. Set it to at least 1."),
        (
            training.max_length is not None and training.max_length < 1,
            f"max_length is {training.max_length}. Set at least 1.",
        ),
        (training.max_steps == 0, "max_steps is 0, which Trainer ignores. Remove it, or set at least 1."),
        (
            training.max_steps < 1 and training.num_train_epochs <= 0,
            f"num_train_epochs is {training.num_train_epochs}, which trains nothing. Set it above 0.",
        ),
        (not math.isfinite(training.learning_rate), f"learning_rate is {training.learning_rate}. Set a finite number."),
        (training.weight_decay < 0, f"weight_decay is {training.weight_decay}. Set it to at least 0."),
        (not 0 <= percentage < 100, f"validation_split_percentage is {percentage}. Set 0 to 99."),
        (
            bool(percentage) and arguments.script.dataset_streaming,
            "validation_split_percentage cannot split a stream. Use a dataset with a test split.",
        ),
    ]


def _check_choices(arguments: "Arguments") -> list[tuple[bool, str]]:
    model, script, recipe, training = arguments.model, arguments.script, arguments.recipe, arguments.training
    changed = [name for name in LORA_FIELDS if getattr(model, name) != type(model).__dataclass_fields__[name].default]
    optimizer = optimizer_name(training)
    is_shardable = optimizer in SHARDABLE or is_bitsandbytes_optimizer(optimizer)
    return [
        (
            bool(model.model_name_or_path) == bool(recipe.config_name),
            "name a pretrained model in model_name_or_path, or the config of a new one in config_name: one of the two.",
        ),
        (
            bool(recipe.config_name) and not recipe.tokenizer_name,
            "config_name is set without a tokenizer_name. Name a tokenizer.",
        ),
        (
            bool(recipe.config_name) and (model.use_peft or model.load_in_4bit),
            "config_name trains all weights of a new model. Remove use_peft and load_in_4bit.",
        ),
        (bool(recipe.config_overrides) and not recipe.config_name, "config_overrides needs config_name."),
        (
            bool(changed) and not model.use_peft,
            f"{', '.join(changed)} set, but not use_peft: all weights would be trained. Set use_peft: true.",
        ),
        (model.load_in_8bit, "load_in_8bit cannot be sharded. Use load_in_4bit."),
        (model.load_in_4bit and not model.use_peft, "4-bit weights cannot be trained. Set use_peft: true."),
        (recipe.merge_adapter and not model.use_peft, "merge_adapter needs use_peft: true."),
        (
            bool(script.dataset_name) == bool(arguments.mixture.datasets),
            "name the data in dataset_name, or a mixture in datasets: one of the two.",
        ),
        (
            patches.is_fsdp_requested() and not is_shardable,
            f"optim: {optimizer} fails to train, save or resume under FSDP2. Use adamw_8bit, paged_adamw_32bit, or one of "
            f"{', '.join(SHARDABLE)}.",
        ),
    ]


def _check_launch(arguments: "Arguments") -> list[tuple[bool, str]]:
    training, environment = arguments.training, os.environ
    launched, seen = int(environment.get("WORLD_SIZE", "1")), training.world_size
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    is_low = str(arguments.model.dtype).removeprefix("torch.") in ("bfloat16", "float16")
    is_fsdp = patches.is_fsdp_requested()
    state_type = environment.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    return [
        (
            is_fsdp and environment.get("FSDP_VERSION", "1") != "2",
            "the Accelerate config asks for FSDP1. Set fsdp_version: 2, or convert the file with `accelerate to-fsdp2`.",
        ),
        (
            is_fsdp and state_type != "SHARDED_STATE_DICT",
            f"fsdp_state_dict_type is {state_type}, which gathers the model on rank 0 in every save. Set SHARDED_STATE_DICT.",
        ),
        (
            launched != seen,
            f"{launched} ranks were launched, but Trainer sees {seen}: each would train alone. Start them with accelerate launch "
            f"and one of the templates.",
        ),
        (
            precision == "bf16" and not training.bf16,
            "the template sets mixed_precision: bf16, but the recipe bf16: false. Remove one of the two.",
        ),
        (
            precision == "no" and is_low and not arguments.model.use_peft,
            f"dtype: {arguments.model.dtype} without mixed precision trains {arguments.model.dtype} weights, and small updates "
            f"are lost. Set dtype: float32, or mixed_precision: bf16 in the template.",
        ),
    ]


def check_export_target(arguments: "Arguments") -> None:
    """Raise a RecipeError on every rank if the export or the upload must fail at the end of training. Collective."""

    def check() -> None:
        output = arguments.training.output_dir
        try:
            os.makedirs(output, exist_ok=True)  # noqa: PTH103
        except OSError as error:
            raise RecipeError(f"output_dir: {output} cannot be created: {error.strerror}.") from error
        if not os.access(output, os.W_OK):
            raise RecipeError(f"output_dir: {output} is not writable.")
        if arguments.training.push_to_hub:
            from huggingface_hub import whoami

            try:
                whoami(token=arguments.training.hub_token)
            except Exception as error:
                raise RecipeError(
                    f"push_to_hub is set, but the Hub refuses the token: {error}. Run `hf auth login`."
                ) from error

    distributed.run_on_main(check)
