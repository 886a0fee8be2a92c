"""Sets and checks the dtypes of parameters, gradient reduction and outputs before sharding.

Under FSDP2, trainable parameters stay in float32 and are cast to the mixed-precision dtype when they are gathered. FSDP1
flattens each unit into one tensor of one dtype, so adapters take the dtype of the base weights.

Source: trl 1.16 `sft_trainer.py`; torch 2.13 `_flat_param.py`; accelerate 1.15 `fsdp_utils.py`.
"""

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import TrainerCallback

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import TemplateError
from hf_fsdp_recipes.patches import registry
from hf_fsdp_recipes.precision import format_dtype, mixed_precision_dtype

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from trl import ModelConfig


def set_frozen_dtype(model_arguments: "ModelConfig") -> None:
    """Choose the mixed-precision dtype for the unquantized parameters of a 4-bit model, which are frozen.

    Frozen parameters need no fp32 master weights. Changes `dtype` only if it still has TRL's default value. TRL also uses
    `dtype` as the compute dtype of quantization.
    """
    precision = mixed_precision_dtype()
    if model_arguments.load_in_4bit and precision is not None and model_arguments.dtype in (None, "auto", "float32"):
        model_arguments.dtype = format_dtype(precision)


def cast_trainable(model: torch.nn.Module, fsdp_version: int | None, adapter_dtype: str = "auto") -> None:
    """Cast adapters to their training dtype, print all dtypes on rank 0, and check that FSDP1 can shard the parameters.

    Every rank calls this before sharding; not a collective. `fsdp_version` is None without FSDP. Under FSDP1, raises a
    TemplateError if parameters have more than one dtype, or if the output head is in lora_modules_to_save.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if frozen and (fsdp_version is not None or adapter_dtype != "auto"):
        default = frozen[0].dtype if fsdp_version == 1 else torch.float32
        dtype = default if adapter_dtype == "auto" else getattr(torch, adapter_dtype)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    _print_dtypes(model)
    if fsdp_version == 1:
        _check_fsdp1(model)


def set_reduction_dtype(plugin: "FullyShardedDataParallelPlugin | None", reduce_dtype: str = "float32") -> None:
    """Choose the dtype of gradient reduction under mixed precision, and keep the dtypes of the model's outputs and buffers.

    Accelerate 1.15 would reduce gradients in the mixed-precision dtype. It would also round the outputs of each unit
    (FSDP2), or buffers such as rotary frequencies (FSDP1), to that dtype. Nothing changes without mixed precision, or without
    FSDP (Accelerate's `plugin` is None). Every rank calls this before sharding; not a collective.
    """
    if plugin is None or plugin.mixed_precision_policy is None:
        return
    policy = plugin.mixed_precision_policy
    if policy.param_dtype in (None, torch.float32):
        return
    registry.apply("reduction dtype")
    dtype = getattr(torch, reduce_dtype)
    # Leave the dtype of outputs unset: a lower dtype would round the loss, and float32 would double the memory of the
    # activations that units pass on.
    kept = {"output_dtype": None} if plugin.fsdp_version == 2 else {"buffer_dtype": None}
    plugin.mixed_precision_policy = replace(policy, reduce_dtype=dtype, **kept)
    if dtype != torch.float32:
        distributed.print_main(
            f"gradients are reduced in {reduce_dtype}: faster on slow networks, but each sum keeps only 8 bits of precision"
        )


def _print_dtypes(model: torch.nn.Module) -> None:
    """Print the number of elements of each dtype; an element of the dtype that stores 4-bit weights holds several."""
    counts: Counter[tuple[str, str]] = Counter()
    for parameter in model.parameters():
        is_4bit = type(parameter).__name__ == "Params4bit"
        kind = "trainable" if parameter.requires_grad else "frozen 4-bit in" if is_4bit else "frozen"
        counts[kind, format_dtype(parameter.dtype)] += parameter.numel()
    found = ", ".join(f"{count:,} {kind} {dtype}" for (kind, dtype), count in sorted(counts.items()))
    distributed.print_main(f"dtypes: {found}")


class DtypesCallback(TrainerCallback):
    """Sets the dtype of gradient reduction, and checks that in mixed precision trainable parameters have fp32 master weights."""

    def __init__(self, adapter_dtype: str = "auto", reduce_dtype: str = "float32") -> None:
        self.adapter_dtype = adapter_dtype
        self.reduce_dtype = reduce_dtype

    def on_init_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Set the reduction dtype before TRL shards a reference model, so that it rounds like the trained model."""
        set_reduction_dtype(getattr(AcceleratorState(), "fsdp_plugin", None), self.reduce_dtype)

    def on_train_begin(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        *,
        model: torch.nn.Module,
        **kwargs: Any,
    ) -> None:
        """Raise a TemplateError if trainable parameters are not stored in float32, unless the recipe chose their dtype."""
        if mixed_precision_dtype() is None or self.adapter_dtype != "auto":
            return
        is_4bit = any(getattr(module, "is_loaded_in_4bit", False) for module in model.modules())
        if is_4bit and FullyShardedDataParallel.fsdp_modules(model):
            return  # under FSDP1, adapters share the dtype of their unit
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        lower = [f"{name} ({p.dtype})" for name, p in trainable.items() if p.dtype != torch.float32]
        if lower:
            raise TemplateError(
                f"{len(lower)} trainable parameters have no fp32 master weights: {', '.join(lower[:3])}. Set dtype: float32; or, "
                f"if the lower precision is intended, set mixed_precision: 'no' in the template, or adapter_dtype for an adapter."
            )
        num_elements = sum(parameter.numel() for parameter in trainable.values())
        distributed.print_main(f"fp32 master weights: {num_elements:,} elements")


def _check_fsdp1(model: torch.nn.Module) -> None:
    counts = Counter(parameter.dtype for parameter in model.parameters())
    common = counts.most_common(1)[0][0]
    others = [f"{name} ({p.dtype})" for name, p in model.named_parameters() if p.dtype != common]
    if others:
        raise TemplateError(
            f"FSDP1 needs one dtype for all parameters, but {len(others)} are not {common}: {', '.join(others[:3])}. Use an "
            f"fsdp2 template, or set dtype: {format_dtype(common)}."
        )
    from peft.utils import ModulesToSaveWrapper

    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, ModulesToSaveWrapper):
        raise TemplateError(
            "lora_modules_to_save includes the output head, which TRL's fused loss cannot read under FSDP1. Use an fsdp2 "
            "template, or remove the head from lora_modules_to_save."
        )
