"""Computes adapters that PEFT derives from the base weights (PiSSA, OLoRA), after the base weights are loaded.

`patches/peft.py` defers the computation until then. Only FSDP2 and unquantized linear layers are supported.

Source: peft 0.21 `lora/layer.py` (`LoraLayer.pissa_init`, `olora_init`).
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.shard_layout import find_shard
from hf_fsdp_recipes.patches.peft import DEFERRED_INIT

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


def has_deferred_adapters(model: torch.nn.Module) -> bool:
    """Return whether adapters of a model are still to be computed from its base weights."""
    return any(DEFERRED_INIT in module.__dict__ for module in model.modules())


@torch.no_grad()
def compute_adapters(model: torch.nn.Module, device: torch.device) -> None:
    """Compute the deferred adapters of an FSDP2 model, and subtract `scaling * B @ A` from the base weights, as PEFT does.

    Collective: every rank must call this. Each rank computes its share of the layers with PEFT's own function and holds
    the full weights of at most two layers at a time.

    Args:
        model: a model whose base weights are loaded.
        device: this rank's compute device.

    Raises:
        LoadError: on every rank, if PEFT cannot compute an adapter.
    """
    layers = [module for module in model.modules() if DEFERRED_INIT in module.__dict__]
    rank, world_size = distributed.rank(), distributed.world_size()
    for start in range(0, len(layers), world_size):
        group, own, computed = layers[start : start + world_size], None, None
        for number, layer in enumerate(group):
            weight = layer.get_base_layer().weight.detach().to(device)
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            own = weight if number == rank else own
        with distributed.sync_errors():
            computed = None if own is None else _compute(group[rank], own)
        for number, layer in enumerate(group):
            adapter, _ = layer.__dict__.pop(DEFERRED_INIT)
            parameters = (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
            a, b = computed if computed is not None and number == rank else _empty(parameters, device)
            for matrix in (a, b) if distributed.is_distributed() else ():
                dist.broadcast(matrix, src=number)
            for parameter, matrix in zip(parameters, (a, b), strict=True):
                _local(parameter).copy_(matrix[_rows(parameter)])
            weight = layer.get_base_layer().weight
            left, right = (a.T, b.T) if layer.fan_in_fan_out else (b, a)
            delta = layer.scaling[adapter] * left[_rows(weight)] @ right
            _local(weight).copy_(_local(weight).to(delta) - delta)


def _compute(layer: "LoraLayer", weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices A and B that PEFT computes from a layer's full weight. PEFT gets plain tensors instead of shards."""
    adapter, compute = layer.__dict__[DEFERRED_INIT]
    base, a, b = (
        SimpleNamespace(weight=torch.nn.Parameter(t, requires_grad=False)) for t in (weight, weight[:0], weight[:0])
    )
    compute(
        SimpleNamespace(
            get_base_layer=lambda: base,
            lora_A={adapter: a},
            lora_B={adapter: b},
            scaling=layer.scaling,
            r=layer.r,
            fan_in_fan_out=layer.fan_in_fan_out,
        )
    )
    expected = [layer.lora_A[adapter].weight.shape, layer.lora_B[adapter].weight.shape]
    found = [matrix.weight.detach().float().contiguous() for matrix in (a, b)]
    if [matrix.shape for matrix in found] != expected:
        raise LoadError(
            f"from a weight of shape {list(weight.shape)}, PEFT computes initial adapter matrices of shapes "
            f"{[list(matrix.shape) for matrix in found]}, but this adapter needs {[list(shape) for shape in expected]}. "
            f"Lower lora_r, or remove this layer from lora_target_modules."
        )
    return found[0], found[1]


def _empty(parameters: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(parameter.shape, device=device) for parameter in parameters)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _rows(tensor: torch.Tensor) -> slice:
    """Return, as a slice, which rows of a matrix this rank holds."""
    found = find_shard(tensor) if hasattr(tensor, "device_mesh") else None
    first, count, _ = found or (0, tensor.numel(), False)
    return slice(first // tensor.shape[1], (first + count) // tensor.shape[1])
