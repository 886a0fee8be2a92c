"""Checks that the recipe's speed and memory features work in this launch, and changes settings that they depend on.

Without these checks, unsupported features fail in the first step or silently do nothing. All features except
`compile_blocks` belong to Trainer or TRL.

Source: trl 1.16 `activation_offloading.py`; accelerate 1.15 `_prepare_fsdp2`; transformers 5.23 `trainer_optimizer.py`.
"""

import multiprocessing
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from accelerate.utils import parse_flag_from_env

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.configs.optimizers import is_bitsandbytes_optimizer, optimizer_errors, optimizer_name
from hf_fsdp_recipes.environment import fsdp_version, num_cores
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training import attention

if TYPE_CHECKING:
    from trl import SFTConfig

    from hf_fsdp_recipes.training.arguments import Arguments, RecipeArguments

REGIONAL_COMPILATION = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
TORCHAO_OPTIMIZERS = ("adamw_torch_8bit", "adamw_torch_4bit")


def check_features(arguments: "Arguments") -> None:
    """Raise a RecipeError that lists features that are not installed, not supported on these ranks, or conflicting.

    A dry run only checks for conflicts, because the job may run on a different machine. Not a collective.
    """
    training, recipe = arguments.training, arguments.recipe
    optimizer = optimizer_name(training)
    refused = optimizer_errors(optimizer, fsdp_version())
    errors = [*refused, *_conflicts(training, recipe)]
    if not recipe.dry_run:
        attention.select_implementation(recipe.attention, training.use_cpu)
        missing = [] if refused else _installation_errors(optimizer)
        errors += [*_accelerator_errors(training), *missing, *_shared_memory_errors(training)]
    if errors:
        raise RecipeError(" ".join(errors))


def _accelerator_errors(training: "SFTConfig") -> Iterator[str]:
    if getattr(training, "activation_offloading", False) and training.use_cpu:
        yield (
            "activation_offloading: true needs an accelerator, but the ranks run on CPUs. Set it to false; "
            "gradient_checkpointing: true saves memory on CPUs too."
        )
    if not training.use_liger_kernel:
        return
    missing = [name for name in ("liger_kernel", "triton") if find_spec(name) is None]
    if training.use_cpu:
        yield "use_liger_kernel: true needs a GPU, but the ranks run on CPUs. Set it to false."
    elif missing:
        yield (
            f"use_liger_kernel: true needs {' and '.join(missing)}. Run pip install liger-kernel triton, or set it to false."
        )


def _installation_errors(optimizer: str) -> Iterator[str]:
    library = "bitsandbytes" if is_bitsandbytes_optimizer(optimizer) else "torchao"
    is_used = library == "bitsandbytes" or optimizer in TORCHAO_OPTIMIZERS
    if is_used and find_spec(library) is None:
        yield f"optim: {optimizer} needs {library}. Run pip install {library}, or use optim: adamw_torch_fused."


def _shared_memory_errors(training: "SFTConfig") -> Iterator[str]:
    settings = {"dataset_num_proc": 1, "dataloader_num_workers": 0}  # the largest values that start no processes
    used = [name for name, limit in settings.items() if (getattr(training, name, None) or 0) > limit]
    try:
        if used:
            multiprocessing.Lock()  # on Linux, the lock and the batches of data loaders are in /dev/shm
    except OSError as error:
        yield (
            f"{used[0]} is {getattr(training, used[0])}, but processes cannot share memory here ({error.strerror}). Free space "
            f"in /dev/shm, start the container with --shm-size=16g, or drop {' and '.join(used)}."
        )


def _conflicts(training: "SFTConfig", recipe: "RecipeArguments") -> Iterator[str]:
    is_sft = hasattr(training, "packing")
    if is_sft and training.padding_free and not training.packing and training.max_length is not None:
        yield (
            f"padding_free: true ignores max_length: {training.max_length}, because TRL then does not truncate rows. Set "
            f"max_length: null, or packing: true, which has no padding either."
        )
    # transformers 5.23 renamed gradient_checkpointing to activation_checkpointing, and keeps the old name in sync.
    if training.gradient_checkpointing and parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING"):
        yield (
            "gradient_checkpointing: true (TRL's default) and fsdp_activation_checkpointing: true in the template would "
            "recompute layers twice. Set gradient_checkpointing: false in the recipe."
        )
    is_launched = not recipe.dry_run or fsdp_version() is not None  # hf-fsdp rehearse reads recipes without a launch
    if recipe.compile_blocks and is_launched and fsdp_version() != 2:
        yield (
            "compile_blocks: true needs FSDP2, where Accelerate compiles blocks in place. Use an fsdp2_*.yaml template, or "
            "set compile_blocks: false."
        )
    if training.torch_compile and fsdp_version() == 1 and parse_flag_from_env(REGIONAL_COMPILATION):
        yield (
            "torch_compile: true with dynamo_use_regional_compilation: true does not work under FSDP1, because Accelerate "
            "cannot wrap the blocks of an FSDP1 model. Use an fsdp2_*.yaml template with compile_blocks: true, or turn "
            "compilation off."
        )


def use_cores_for_offload(training: "SFTConfig") -> None:
    """If parameters are offloaded, let each rank use its share of the cores for the optimizer. Not a collective.

    `accelerate launch` sets OMP_NUM_THREADS to 1 when it starts several ranks, so AdamW would run on one core.
    """
    if training.use_cpu or not parse_flag_from_env("FSDP_OFFLOAD_PARAMS") or os.environ.get("OMP_NUM_THREADS") != "1":
        return
    num_threads = max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(num_threads)
    distributed.print_main(f"offload: {num_threads} threads per rank for the optimizer")


def enable_block_compilation(arguments: "Arguments") -> None:
    """Turn on torch.compile for each block if the recipe sets `compile_blocks`. Call it before building the Trainer.

    Trainer's `torch_compile` alone compiles the entire model; an environment variable makes Accelerate compile each block.
    """
    if not arguments.recipe.compile_blocks:
        return
    training = arguments.training
    training.torch_compile = True
    training.torch_compile_backend = training.torch_compile_backend or "inductor"
    os.environ[REGIONAL_COMPILATION] = "true"
    distributed.print_main(f"torch.compile: each block separately, backend {training.torch_compile_backend}")
