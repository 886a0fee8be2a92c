"""Checks a recipe before anything is loaded. It finds only mistakes that upstream ignores, finds too late or does not name."""

import os
import tempfile
from pathlib import Path

from huggingface_hub import whoami

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import RecipeError, describe
from hf_fsdp_recipes.training.arguments import Arguments
from hf_fsdp_recipes.training.sharded_optimizer import BITSANDBYTES, SHARDABLE, optimizer_name
from hf_fsdp_recipes.upstream.patches import is_fsdp_requested

LORA_FIELDS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_modules_to_save",
    "use_dora",
)


def check_arguments(arguments: Arguments) -> None:
    """Raise a RecipeError that lists everything wrong with a recipe. Print a note if training would lose small updates.

    The ranks do not communicate here. Each rank checks on its own and gets the same result.
    """
    if wrong := [
        message
        for is_wrong, message in _check_recipe(arguments) + _check_launch(arguments)
        if is_wrong
    ]:
        raise RecipeError(" ".join(wrong))
    dtype, training = str(arguments.model.dtype), arguments.training
    has_masters = arguments.model.use_peft or (
        is_fsdp_requested() and (training.bf16 or training.fp16)
    )
    if dtype in ("bfloat16", "float16") and not has_masters:
        distributed.print_main(
            f"note: the weights are trained in {dtype}, without float32 master weights, so small updates are lost."
        )


def _check_recipe(arguments: Arguments) -> list[tuple[bool, str]]:
    """Return a pair for each check: whether the recipe fails it, and what to say then."""
    model, recipe, script, mixture = (
        arguments.model,
        arguments.recipe,
        arguments.script,
        arguments.mixture,
    )
    training, percentage = arguments.training, recipe.validation_split_percentage
    steps, epochs = training.max_steps, training.num_train_epochs
    length, accumulated = training.max_length, training.gradient_accumulation_steps
    is_misplaced = script.dataset_streaming if mixture.datasets else mixture.streaming
    defaults = {name: type(model).__dataclass_fields__[name].default for name in LORA_FIELDS}
    changed = [name for name, default in defaults.items() if getattr(model, name) != default]
    one_model = bool(model.model_name_or_path) != bool(recipe.config_name)
    one_dataset = bool(script.dataset_name) != bool(mixture.datasets)
    return [
        (
            not one_model,
            "Set either model_name_or_path, a pretrained model, or config_name, the config of a new one.",
        ),
        (not one_dataset, "Set either dataset_name, or datasets for a mixture."),
        (
            bool(recipe.config_overrides and not recipe.config_name),
            "config_overrides needs config_name.",
        ),
        (
            not training.output_dir,
            "output_dir is empty. Name a directory for checkpoints and the export.",
        ),
        (accumulated < 1, f"gradient_accumulation_steps is {accumulated}. Set it to at least 1."),
        (length is not None and length < 1, f"max_length is {length}. Set it to at least 1."),
        (steps == 0, "max_steps is 0, which Trainer ignores. Remove it, or set it to at least 1."),
        (
            steps < 0 and epochs <= 0,
            f"num_train_epochs is {epochs}, which trains nothing. Set it above 0.",
        ),
        (
            not 0 <= percentage < 100,
            f"validation_split_percentage is {percentage}. Set it to at least 0, below 100.",
        ),
        (
            percentage > 0 and arguments.is_streamed,
            "A stream cannot be split. Remove validation_split_percentage.",
        ),
        (
            is_misplaced,
            "dataset_streaming belongs to dataset_name, and streaming to datasets. Set the other one.",
        ),
        (
            bool(changed) and not model.use_peft,
            f"{', '.join(changed)} without use_peft: true would train all weights.",
        ),
        (recipe.merge_adapter and not model.use_peft, "merge_adapter needs use_peft: true."),
    ]


def _check_launch(arguments: Arguments) -> list[tuple[bool, str]]:
    training, is_fsdp, optimizer = (
        arguments.training,
        is_fsdp_requested(),
        optimizer_name(arguments.training),
    )
    launched, precision = (
        int(os.environ.get("WORLD_SIZE", "1")),
        os.environ.get("ACCELERATE_MIXED_PRECISION"),
    )
    state_type = os.environ.get("FSDP_STATE_DICT_TYPE")
    return [
        (
            launched != training.world_size,
            f"{launched} ranks were launched, but Trainer sees {training.world_size}: each would train alone. Use `accelerate "
            f"launch` with a template.",
        ),
        (
            is_fsdp and state_type != "SHARDED_STATE_DICT",
            f"fsdp_state_dict_type is {state_type}, which gathers the model on rank 0 in each save. Set SHARDED_STATE_DICT.",
        ),
        (
            precision == "bf16" and not training.bf16,
            "the template sets mixed_precision: bf16, but the recipe bf16: false. Remove one of the two.",
        ),
        (
            is_fsdp and optimizer not in SHARDABLE + BITSANDBYTES,
            f"optim: {optimizer} fails to train, save or resume under FSDP2. Use one of "
            f"{', '.join(SHARDABLE + BITSANDBYTES)}.",
        ),
    ]


def check_targets(arguments: Arguments) -> None:
    """Raise a RecipeError on every rank if output_dir cannot be written or the Hub would refuse the upload. Collective."""

    def check() -> None:
        output = Path(arguments.training.output_dir)
        try:
            output.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=output).close()
        except OSError as error:
            raise RecipeError(
                f"output_dir: {output} cannot be written: {error.strerror}. Name another."
            ) from error
        if arguments.training.push_to_hub:
            try:
                whoami(token=arguments.training.hub_token)
            except Exception as error:
                raise RecipeError(
                    f"push_to_hub cannot log in: {describe(error)} Run `hf auth login`."
                ) from error

    distributed.run_on_main(check)
