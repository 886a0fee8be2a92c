"""DoRA's magnitudes: the row norms of base weights, which are not there yet when PEFT adds the adapter.

PEFT gets a magnitude on meta instead, and it is computed here when the base weights have arrived, by the ranks that hold
the rows. FSDP2, and linear layers with plain weights only.

Source: peft 0.21 `lora/dora.py` (`DoraLinearLayer.update_layer`, `get_weight_norm`).
"""

from typing import Any

import torch

from hf_fsdp_recipes.errors import LoadError


def defer_magnitude(dora_layer: Any, base_layer: torch.nn.Module, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
    """Give a DoRA layer of a base layer on meta a magnitude on meta, (out_features,). No collective.

    Raises:
        LoadError: a layer whose norms are not those of the rows it is cut by.
    """
    kind = type(base_layer).__name__
    if type(dora_layer).__name__ != "DoraLinearLayer" or dora_layer.fan_in_fan_out or kind == "Linear4bit":
        raise LoadError(
            f"use_dora: true on a {kind}. Rule: load_model computes DoRA's magnitudes for linear layers with unquantised "
            f"weights. Remedy: lora_target_modules without it, or LoRA."
        )
    dtype = torch.promote_types(base_layer.weight.dtype, lora_a.dtype)
    dora_layer.weight = torch.nn.Parameter(torch.empty(lora_b.shape[0], dtype=dtype, device="meta"))


def is_magnitude(name: str) -> bool:
    """Tell whether a parameter is a DoRA magnitude."""
    return ".lora_magnitude_vector." in name


def check_absent(model: torch.nn.Module) -> None:
    """Refuse DoRA under FSDP1. Any rank, no collective.

    Raises:
        LoadError: the model has a magnitude.
    """
    if any(is_magnitude(name) for name, _ in model.named_parameters()):
        raise LoadError(
            "use_dora: true under FSDP1. Rule: PEFT's DoRA asks lora_A for its shape, and FSDP1 holds it flat. Remedy: an "
            "fsdp2 template, or LoRA."
        )


def fill(model: torch.nn.Module) -> None:
    """Compute the magnitudes of an FSDP2 model whose base weights have arrived. Collective: every rank must call this."""
    for module in model.modules():
        for adapter in getattr(module, "lora_magnitude_vector", None) or ():
            magnitude = module.lora_magnitude_vector[adapter].weight.detach()
            _local(magnitude).copy_(row_norms(module, adapter))


@torch.no_grad()
def row_norms(layer: Any, adapter: str) -> torch.Tensor:
    """Return the norms of the rows of W + scaling * B @ A that this rank holds, (rows,). Collective.

    Args:
        layer: PEFT's LoRA layer, its weights DTensors cut by rows, or whole.
        adapter: the adapter's name.
    """
    weight = _local(layer.get_base_layer().weight)
    a, b = layer.lora_A[adapter].weight, _local(layer.lora_B[adapter].weight)
    whole_a = a.full_tensor() if hasattr(a, "full_tensor") else a
    return torch.linalg.norm(weight + layer.scaling[adapter] * (b @ whole_a), dim=1)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
