"""Which dtype trains: settled once, before sharding, so that no rank finds out in the middle of it.

What trains under FSDP2 is kept in float32 and cast to the mixed-precision dtype where it is gathered. FSDP1
flattens each unit, which takes one dtype for all of a unit, so there adapters follow the base weights. Casts
nothing that is frozen.

Source: trl 1.16 `sft_trainer.py` (makes adapters of 4-bit models bfloat16); torch 2.13 `_flat_param.py` (one
dtype a unit); accelerate 1.15 `fsdp_utils.py` (upcasts what trains, but not beside 4-bit weights).
"""

import os
from collections import Counter
from typing import Any

import torch
from transformers import TrainerCallback

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import TemplateError
from hf_fsdp_recipes.loading.bnb_4bit import MIXED_PRECISION_DTYPES


def follow_precision(model_arguments: Any) -> None:
    """Give what stays frozen beside 4-bit weights the mixed-precision dtype; masters of it would serve nobody.

    Changes `dtype` where it is TRL's default; the quantisation config takes its compute dtype from there too.
    """
    precision = MIXED_PRECISION_DTYPES.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    if model_arguments.load_in_4bit and precision is not None and model_arguments.dtype in (None, "auto", "float32"):
        model_arguments.dtype = str(precision).removeprefix("torch.")


def settle(model: torch.nn.Module, fsdp_version: int | None, wish: str = "auto") -> None:
    """Cast what trains, print a census on rank 0, refuse what cannot be sharded. Every rank; no collective.

    Args:
        model: with its adapters, before sharding.
        fsdp_version: 1, 2, or None without FSDP.
        wish: auto, or a dtype's name for the adapters.

    Raises:
        TemplateError: under FSDP1, parameters of more than one dtype; names some of the fewer kind.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if frozen and fsdp_version is not None:
        dtype = _adapter_dtype(frozen, fsdp_version, wish)
        for parameter in trainable:
            parameter.data = parameter.data.to(dtype)
    distributed.print_main(f"dtypes: {describe(model)}")
    if fsdp_version == 1:
        _check_uniform(model)
        _check_head(model)


def _adapter_dtype(frozen: list[torch.nn.Parameter], fsdp_version: int, wish: str) -> torch.dtype:
    if wish != "auto":
        return getattr(torch, wish)
    return torch.float32 if fsdp_version == 2 else frozen[0].dtype


def describe(model: torch.nn.Module) -> str:
    """Return how many elements of which dtype train and are frozen, 4-bit weights by what holds them."""
    census: Counter[tuple[str, str]] = Counter()
    for parameter in model.parameters():
        is_packed = type(parameter).__name__ == "Params4bit"
        kind = "training" if parameter.requires_grad else "frozen 4-bit in" if is_packed else "frozen"
        census[kind, str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return ", ".join(f"{count:,} {kind} {dtype}" for (kind, dtype), count in sorted(census.items()))


class MastersCallback(TrainerCallback):
    """Sees, when training begins, that what trains in mixed precision has float32 masters, and says so once.

    Args:
        wish: as in `settle`; a dtype that was asked for is not looked at.
    """

    def __init__(self, wish: str = "auto") -> None:
        self.wish = wish

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Check the sharded model. Every rank; no collective: all have the same dtypes."""
        in_mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") in MIXED_PRECISION_DTYPES
        if in_mixed_precision and self.wish == "auto" and not _is_flat_4bit(model):
            check_masters(model)


def check_masters(model: torch.nn.Module) -> None:
    """Refuse to train in less than float32 between the steps.

    Raises:
        TemplateError: names some of the parameters that are not float32.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lower = [f"{name} ({parameter.dtype})" for name, parameter in trained.items() if parameter.dtype != torch.float32]
    if lower:
        raise TemplateError(
            f"{len(lower)} parameters would train without float32 masters: {', '.join(lower[:3])}. Rule: in mixed precision "
            f"what trains is float32 and cast where it is used. Remedy: mixed_precision: 'no' in the template, or "
            f"adapter_dtype, if that is what you want."
        )
    distributed.print_main(
        f"masters: {sum(parameter.numel() for parameter in trained.values()):,} elements train in float32"
    )


def _is_flat_4bit(model: torch.nn.Module) -> bool:
    """Tell whether FSDP1 holds 4-bit weights: adapters share their units, and so their dtype."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    is_4bit = any(getattr(module, "is_loaded_in_4bit", False) for module in model.modules())
    return is_4bit and bool(FSDP.fsdp_modules(model))


def _check_uniform(model: torch.nn.Module) -> None:
    census = Counter(parameter.dtype for parameter in model.parameters())
    if len(census) < 2:
        return
    common = census.most_common(1)[0][0]
    offenders = [f"{name} ({p.dtype})" for name, p in model.named_parameters() if p.dtype != common]
    raise TemplateError(
        f"{len(offenders)} parameters are not {common} like the rest: {', '.join(offenders[:3])}. Rule: FSDP1 flattens a "
        f"unit's parameters, which takes one dtype. Remedy: an fsdp2 template, or dtype: {str(common).removeprefix('torch.')}."
    )


def _check_head(model: torch.nn.Module) -> None:
    """Refuse a saved copy of the output head, whose weight TRL's fused loss finds flattened under FSDP1."""
    from peft.utils import ModulesToSaveWrapper

    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, ModulesToSaveWrapper):
        raise TemplateError(
            "lora_modules_to_save names the output head. Rule: TRL's loss multiplies by the head's weight, which FSDP1 holds "
            "flat. Remedy: an fsdp2 template, or leave the head out."
        )
