"""Computes DoRA's magnitudes, the row norms of adapted weights, from each rank's shards after loading.

`patches/peft.py` keeps the magnitudes on meta until then. Only FSDP2 and unquantized linear layers are supported.

Source: peft 0.21 `lora/dora.py` (`DoraLinearLayer.update_layer`, `get_weight_norm`).
"""

import torch


def is_magnitude(name: str) -> bool:
    """Return whether a parameter is a DoRA magnitude."""
    return ".lora_magnitude_vector." in name


@torch.no_grad()
def fill_magnitudes(model: torch.nn.Module) -> None:
    """Compute the magnitudes of an FSDP2 model whose base weights are loaded: the row norms of W + scaling * B @ A.

    Collective: every rank must call this.
    """
    for layer in model.modules():
        for adapter in getattr(layer, "lora_magnitude_vector", None) or ():
            weight, a, b = layer.get_base_layer().weight, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            full_a = a.full_tensor() if hasattr(a, "full_tensor") else a
            adapted = _local(weight) + layer.scaling[adapter] * (_local(b) @ full_a)
            _local(layer.lora_magnitude_vector[adapter].weight).copy_(torch.linalg.norm(adapted, dim=1))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
