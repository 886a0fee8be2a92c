"""Finds the weights from which a model's 4-bit weights were quantized, to merge an adapter."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.merge import from_base
from hf_fsdp_recipes.export.shells import AdaptedShell
from hf_fsdp_recipes.export.sources import Source, Sources, on_meta, weight_source
from hf_fsdp_recipes.loading.bnb_4bit import Layer
from hf_fsdp_recipes.loading.placeholder import IDENTITY


def with_originals(
    model: PeftModel,
    shell: AdaptedShell,
    held: Sources,
    trained: set[str],
) -> Sources:
    """Return the tensors of a quantized model, with the files' weights instead of 4-bit ones.

    `held` has the model's own tensors, and `trained` the names of those that are trained. Others
    get the dtype in which they were loaded, because preparing a model for QLoRA casts them.
    """
    layers: dict[str, Any] = {}  # {name of a 4-bit weight: its layer}
    for key in shell.base_names:
        path, _, attribute = key.rpartition(".")
        layer: Any = model.get_submodule(path)
        layer = getattr(layer, "base_layer", layer)  # of another adapter
        if attribute == "weight" and hasattr(layer, "quant_state"):
            layers[key] = layer
    if not layers:
        raise ExportError(
            "an adapter is merged into 4-bit weights only, not into other quantized weights. "
            "Export the adapter, and merge it with `hf-fsdp export --merge-adapter`."
        )
    if any(hasattr(layer, IDENTITY) for layer in layers.values()):
        weights = _from_load_model(layers, shell)
    else:
        base = str(shell.base.name_or_path)
        weights = from_base(base, model.active_peft_config.revision, shell)
    sources = dict(held)
    for key, weight in weights.items():
        own = held[key]
        if key in layers:
            sources[key] = Source(weight.meta, partial(_read, weight, layers[key], own))
        elif key not in trained and weight.meta.itemsize < own.meta.itemsize:
            sources[key] = replace(own, meta=on_meta(own.meta, weight.meta.dtype))
    return sources


def _from_load_model(layers: dict[str, Any], shell: AdaptedShell) -> Sources:
    """Return the base's weights from the files that `load_model` has read.

    Raise an ExportError if it did not read a 4-bit layer, or not from one tensor.
    """
    state = shell.base.state_dict()
    checkpoint: Any = None
    weights = {}
    names = dict(shell.base_names)  # in the model that was loaded
    for key, layer in layers.items():
        identity = getattr(layer, IDENTITY, None)
        if identity:
            checkpoint = identity.checkpoint
            names[key] = identity.names[0]
    entries = {entry.name: entry for entry in checkpoint.entries if entry.kind == "stored"}
    for key, name in names.items():
        if name in entries:
            shape = state[shell.base_names[key]]
            weights[key] = weight_source(checkpoint, entries[name], name, shape)
    missing = sorted(layers.keys() - weights.keys())
    if missing:
        raise ExportError(
            f"{missing[:3]} were not read from one tensor each of {checkpoint}. Export the "
            "adapter, and merge it with `hf-fsdp export --merge-adapter`."
        )
    return weights


def _read(
    weight: Source,
    layer: Any,
    packed: Source,
    rank: int,
) -> Tensor | None:
    """Return a weight from the files on one rank, if it is that of the 4-bit layer. Collective."""
    held = packed.read(rank)
    if held is None or distributed.rank() != rank:
        return None
    value: Any = weight.read(rank)
    state = layer.quant_state or layer.weight.quant_state
    options = {
        "blocksize": state.blocksize,
        "compress_statistics": state.nested,
        "quant_type": state.quant_type,
        "quant_storage": held.dtype,
    }
    again = Layer([layer], state.dtype, options).quantize(value.to(held.device))
    trained_bytes = held.view(-1).view(torch.uint8)
    file_bytes = again.view(-1).view(torch.uint8)
    if not torch.equal(trained_bytes, file_bytes):
        raise ExportError(
            "the files do not have the weights that were quantized, so the adapter cannot be "
            "merged. Export it alone."
        )
    return value
