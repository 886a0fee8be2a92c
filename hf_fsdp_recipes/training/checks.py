"""Checks a recipe before anything is loaded.

It finds only mistakes that upstream ignores, finds too late or does not name.
"""

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from huggingface_hub import whoami

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import RecipeError, explained
from hf_fsdp_recipes.training.arguments import Arguments
from hf_fsdp_recipes.training.sharded_optimizer import BITSANDBYTES, SHARDABLE
from hf_fsdp_recipes.upstream.patches import is_fsdp_requested

if TYPE_CHECKING:
    from trl import SFTConfig


def check_arguments(arguments: Arguments) -> None:
    """Raise a RecipeError that lists everything wrong with a recipe.

    Print a note if training would lose small updates. The ranks do not communicate here. Each rank
    checks on its own and gets the same result.
    """
    training = arguments.training
    raise_mistakes(arguments)
    dtype = str(arguments.model.dtype)
    keeps_masters = is_fsdp_requested() and (training.bf16 or training.fp16)
    if dtype in ("bfloat16", "float16") and not arguments.model.use_peft and not keeps_masters:
        distributed.print_main(
            f"note: the weights are trained in {dtype}, without float32 master weights, so small "
            "updates are lost."
        )


def raise_mistakes(arguments: Arguments) -> None:
    """Raise a RecipeError that lists everything wrong with a recipe."""
    mistakes = [
        *_check_model_and_rows(arguments),
        *_check_training(arguments.training),
        *_check_launch(arguments.training),
    ]
    if mistakes:
        raise RecipeError(" ".join(mistakes))


def _check_model_and_rows(arguments: Arguments) -> Iterator[str]:
    model = arguments.model
    recipe = arguments.recipe
    percentage = recipe.validation_split_percentage
    if bool(model.model_name_or_path) == bool(recipe.config_name):
        yield (
            "Set either model_name_or_path, a pretrained model, or config_name, the config of a "
            "new one."
        )
    if bool(arguments.script.dataset_name) == bool(arguments.mixture.datasets):
        yield "Set either dataset_name, or datasets for a mixture."
    if recipe.config_overrides and not recipe.config_name:
        yield "config_overrides needs config_name."
    if not 0 <= percentage < 100:
        yield f"validation_split_percentage is {percentage}. Set it to at least 0, below 100."
    if percentage and arguments.is_streamed:
        yield "A stream cannot be split. Remove validation_split_percentage."
    lora = [
        field.name
        for field in fields(model)
        # The name or the help of each field that only LoRA uses says so.
        if "lora" in str(field).lower()
        and field.name in arguments.given
        and getattr(model, field.name) not in (None, False)
    ]
    lora += ["merge_adapter"] * recipe.merge_adapter
    if lora and not model.use_peft:
        yield f"Set use_peft: true for {', '.join(lora)}. Without it, all weights are trained."
    quantized = [name for name in arguments.given if "bnb" in name]
    if quantized and not model.load_in_4bit:
        yield f"{', '.join(quantized)} needs load_in_4bit: true."
    if model.load_in_8bit:
        yield "load_in_8bit is not supported. Set load_in_4bit: true."


def _check_training(training: "SFTConfig") -> Iterator[str]:
    length = training.max_length
    if not training.output_dir:
        yield "output_dir is empty. Name a directory for checkpoints and the export."
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(training, name) < 1:
            yield f"{name} is {getattr(training, name)}. Set it to at least 1."
    if length is not None and length < 2:
        yield f"max_length is {length}. Set it to at least 2, a token and the next one."
    if training.max_steps == 0:
        yield "max_steps is 0, which Trainer ignores. Remove it, or set it to at least 1."
    if training.max_steps < 0 and training.num_train_epochs <= 0:
        yield (
            f"num_train_epochs is {training.num_train_epochs}, which trains nothing. "
            "Set it above 0."
        )


def _check_launch(training: "SFTConfig") -> Iterator[str]:
    launched = int(os.getenv("WORLD_SIZE", "1"))
    state_type = os.getenv("FSDP_STATE_DICT_TYPE")
    optimizer: Any = training.optim  # Trainer makes it an enum
    optimizers = SHARDABLE + BITSANDBYTES
    if launched != training.world_size:
        yield (
            f"{launched} ranks were launched, but Trainer sees {training.world_size}: each would "
            "train alone. Use `accelerate launch` with a template."
        )
    if is_fsdp_requested() and state_type != "SHARDED_STATE_DICT":
        yield (
            f"fsdp_state_dict_type is {state_type}, which gathers the model on rank 0 in each save."
            " Set SHARDED_STATE_DICT."
        )
    if os.getenv("ACCELERATE_MIXED_PRECISION") == "bf16" and not training.bf16:
        yield (
            "the template sets mixed_precision: bf16, but the recipe bf16: false. Remove one of "
            "the two."
        )
    if is_fsdp_requested() and optimizer not in optimizers:
        yield (
            f"optim: {optimizer.value} fails to train, save or resume under FSDP2. "
            f"Use one of {', '.join(optimizers)}."
        )


def check_targets(arguments: Arguments) -> None:
    """Raise a RecipeError on every rank if the results would have nowhere to go. Collective.

    This is so if output_dir cannot be written, or if the Hub would refuse the upload.
    """
    training = arguments.training
    output = Path(str(training.output_dir))

    def check() -> None:
        with explained(RecipeError, f"output_dir: {output} cannot be written (name another)"):
            output.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=output).close()
        if training.push_to_hub:
            with explained(RecipeError, "push_to_hub cannot log in (run `hf auth login`)"):
                whoami(token=training.hub_token)

    distributed.run_on_main(check)
