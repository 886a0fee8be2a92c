"""What makes training faster or smaller: checked before anything is loaded, and torch.compile block by block.

Every switch is Trainer's or TRL's own but `compile_blocks`. Here stands what each of them needs, because without it
they fail in the first step only, or silently do nothing. Speeds nothing up by itself.

Source: transformers 5.23 `trainer_optimizer.py` (which optimizers are whose); bitsandbytes 0.50 `optim/optimizer.py`
(`state_dict` hides states in a nested dict, which FSDP1's `optim_state_dict` cannot compare); trl 1.16
`activation_offloading.py` (asks torch for its accelerator); accelerate 1.15 `_prepare_fsdp2`, `compile_regions_fsdp2`.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training import attention

REGIONAL_COMPILATION = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
TORCHAO_OPTIMIZERS = ("adamw_torch_8bit", "adamw_torch_4bit")


def check_speed(arguments: Any) -> None:
    """Refuse what is not installed, what these ranks cannot do and what does not work together. No collective.

    A dry run may be on another machine than the job: it is asked only whether things work together.

    Raises:
        RecipeError: all such values at once, each with its rule and a remedy.
    """
    training, recipe = arguments.training, arguments.recipe
    optimizer = _optimizer_name(training)
    faults = [
        *optimizer_faults(optimizer, _fsdp_version()),
        *_padding_faults(training),
        *_compilation_faults(training, recipe),
    ]
    if not recipe.dry_run:
        attention.choose(recipe.attention, training.use_cpu)
        faults += [
            *_kernel_faults(training),
            *_installation_faults(optimizer),
            *_activation_faults(training),
        ]
    if faults:
        raise RecipeError(" ".join(faults))


def _kernel_faults(training: Any) -> Iterator[str]:
    if not training.use_liger_kernel:
        return
    missing = [name for name in ("liger_kernel", "triton") if find_spec(name) is None]
    if training.use_cpu or missing:
        reason = "the ranks are CPUs" if training.use_cpu else f"{' and '.join(missing)} cannot be imported"
        yield (
            f"use_liger_kernel: true, and {reason}. Rule: Liger's kernels are written in Triton, for accelerators. Remedy: "
            f"use_liger_kernel: false, or pip install liger-kernel triton on a GPU machine."
        )


def is_of_bitsandbytes(optimizer: str) -> bool:
    """Tell whether Trainer takes this optimizer from bitsandbytes."""
    return optimizer in ("adamw_8bit", "adamw_bnb_8bit") or optimizer.startswith(
        ("paged_", "lion_", "ademamix", "rmsprop_bnb")
    )


def optimizer_faults(optimizer: str, fsdp_version: int | None) -> Iterator[str]:
    """Yield why an optimizer does not work under an FSDP version (None: without FSDP). No collective."""
    if fsdp_version == 1 and is_of_bitsandbytes(optimizer):
        yield (
            f"optim: {optimizer} under FSDP1. Rule: the state of bitsandbytes' optimizers cannot be gathered for a "
            f"checkpoint there. Remedy: an fsdp2_*.yaml template, or adamw_torch_fused."
        )
    if fsdp_version == 2 and "ademamix" in optimizer:
        yield (
            f"optim: {optimizer} under FSDP2. Rule: AdEMAMix keeps two averages in one tensor, which is not cut as the "
            f"parameter is. Remedy: paged_adamw_32bit or adamw_8bit."
        )


def sharded_optimizer(training: Any) -> tuple[type, dict[str, Any]] | None:
    """Return Trainer's `optimizer_cls_and_kwargs` where FSDP2 needs another class than Trainer's own. No collective."""
    if _fsdp_version() != 2 or not is_of_bitsandbytes(_optimizer_name(training)):
        return None
    from hf_fsdp_recipes.training import sharded_optimizer

    return sharded_optimizer.sharded_optimizer(training)


def _optimizer_name(training: Any) -> str:
    return str(getattr(training.optim, "value", training.optim))


def _installation_faults(optimizer: str) -> Iterator[str]:
    if optimizer in TORCHAO_OPTIMIZERS and find_spec("torchao") is None:
        yield f"optim: {optimizer}, and torchao is not installed. Remedy: pip install torchao, or optim: adamw_torch_fused."
    if not is_of_bitsandbytes(optimizer):
        return
    if find_spec("bitsandbytes") is None:
        yield f"optim: {optimizer}, and bitsandbytes is not installed. Remedy: pip install bitsandbytes, or optim: adamw_torch."


def _padding_faults(training: Any) -> Iterator[str]:
    if training.padding_free and not training.packing and training.max_length is not None:
        yield (
            f"padding_free: true and max_length: {training.max_length} without packing. Rule: TRL cuts no rows there. Remedy: "
            f"max_length: null, or packing: true, which has no padding either."
        )


def _activation_faults(training: Any) -> Iterator[str]:
    if training.activation_offloading and training.use_cpu:
        yield (
            "activation_offloading: true, and the ranks are CPUs. Rule: it moves activations from an accelerator to the "
            "host. Remedy: activation_offloading: false; gradient_checkpointing: true saves memory here too."
        )
    in_template = is_true(os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "false"))
    if in_template and (training.activation_checkpointing or training.gradient_checkpointing):
        yield (
            "gradient_checkpointing: true (TRL's default) and fsdp_activation_checkpointing: true in the template. Rule: a "
            "layer is recomputed once. Remedy: gradient_checkpointing: false in the recipe."
        )


def _compilation_faults(training: Any, recipe: Any) -> Iterator[str]:
    version = _fsdp_version()
    if recipe.compile_blocks and version != 2:
        yield (
            "compile_blocks: true without FSDP2. Rule: there Accelerate compiles blocks in place; elsewhere it wraps them, "
            "which FSDP1 does not survive. Remedy: an fsdp2_*.yaml template, or compile_blocks: false."
        )
    if training.torch_compile and version == 1 and is_true(os.environ.get(REGIONAL_COMPILATION, "false")):
        yield (
            "torch_compile: true and dynamo_use_regional_compilation: true in an FSDP1 template. Rule: Accelerate cannot wrap "
            "the blocks of an FSDP1 model. Remedy: an fsdp2_*.yaml template with compile_blocks: true, or no compilation."
        )


def _fsdp_version() -> int | None:
    if not is_true(os.environ.get("ACCELERATE_USE_FSDP", "false")):
        return None
    return int(os.environ.get("FSDP_VERSION", "1"))


def compile_blocks(arguments: Any) -> None:
    """Turn on torch.compile for each block of the model, where asked for. Before the Trainer is built; no collective.

    Trainer's `torch_compile` alone compiles the model as one; what makes it blocks is a variable of Accelerate's.
    """
    if not arguments.recipe.compile_blocks:
        return
    training = arguments.training
    training.torch_compile = True
    training.torch_compile_backend = training.torch_compile_backend or "inductor"
    os.environ[REGIONAL_COMPILATION] = "true"
    distributed.print_main(f"torch.compile: each block by itself, {training.torch_compile_backend}")
