"""Computes DoRA's magnitudes, the row norms of base weights, on each rank's shard after loading.

`patches/peft.py` keeps them on meta until then. FSDP2 and unquantized linear layers only.

Source: peft 0.21 `lora/dora.py` (`DoraLinearLayer.update_layer`, `get_weight_norm`).
"""

from typing import Any

import torch


def is_magnitude(name: str) -> bool:
    """Return whether a parameter is a DoRA magnitude."""
    return ".lora_magnitude_vector." in name


def fill_magnitudes(model: torch.nn.Module) -> None:
    """Compute the magnitudes of an FSDP2 model whose base weights are loaded.

    Collective: every rank must call this.
    """
    for module in model.modules():
        for adapter in getattr(module, "lora_magnitude_vector", None) or ():
            magnitude = module.lora_magnitude_vector[adapter].weight.detach()
            _local(magnitude).copy_(row_norms(module, adapter))


@torch.no_grad()
def row_norms(layer: Any, adapter: str) -> torch.Tensor:
    """Return the norms of this rank's rows of W + scaling * B @ A, shape (rows,). Collective.

    Args:
        layer: PEFT's LoRA layer, with weights that are sharded by rows or full.
        adapter: the adapter's name.
    """
    weight = _local(layer.get_base_layer().weight)
    a, b = layer.lora_A[adapter].weight, _local(layer.lora_B[adapter].weight)
    full_a = a.full_tensor() if hasattr(a, "full_tensor") else a
    return torch.linalg.norm(weight + layer.scaling[adapter] * (b @ full_a), dim=1)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
