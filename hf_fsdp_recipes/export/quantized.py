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
from hf_fsdp_recipes.export.sources import Source, Sources, on_meta
from hf_fsdp_recipes.loading.bnb_4bit import Layer
from hf_fsdp_recipes.loading.checkpoint import Checkpoint, Entry
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
        layer = model.get_submodule(path)
        if attribute == "weight" and hasattr(layer, "quant_state"):
            layers[key] = layer
    if not layers:
        raise ExportError(
            "an adapter is merged into 4-bit weights only, not into other quantized weights. "
            "Export the adapter, and merge it with `hf-fsdp export --merge-adapter`."
        )
    identity = getattr(next(iter(layers.values())), IDENTITY, None)
    if identity:
        checkpoint = identity.checkpoint
    else:
        base = str(shell.base.name_or_path)
        checkpoint, _ = from_base(base, model.active_peft_config.revision, shell)
    entries = {name: entry for entry in checkpoint.entries for name in entry.names}
    shapes = shell.base.state_dict()
    sources = dict(held)
    for key, name in shell.base_names.items():
        identity = getattr(layers.get(key), IDENTITY, None)
        loaded_name = identity.names[0] if identity else name
        entry = entries.get(loaded_name)
        if key in layers:
            if entry is None or entry.kind != "stored":
                raise ExportError(
                    f"{checkpoint} holds {loaded_name} in several tensors or not at all. Export "
                    "the adapter, and merge it with `hf-fsdp export --merge-adapter`."
                )
            meta = on_meta(shapes[name], entry.dtype)
            read = partial(_read_original, checkpoint, entry, layers[key], held[key])
            sources[key] = Source(meta, read)
        elif entry and key not in trained:
            own = held[key]
            dtype = entry.narrowed(own.meta.dtype).dtype
            sources[key] = replace(own, meta=on_meta(own.meta, dtype))
    return sources


def _read_original(
    checkpoint: Checkpoint,
    entry: Entry,
    layer: Any,
    packed: Source,
    rank: int,
) -> Tensor | None:
    """Return a weight from the files on one rank, if it is that of the 4-bit layer. Collective."""
    held = packed.read(rank)
    if held is None or distributed.rank() != rank:
        return None
    value = checkpoint.read(entry)[entry.name].to(entry.dtype)
    state = layer.quant_state or layer.weight.quant_state
    options = {
        "blocksize": state.blocksize,
        "compress_statistics": state.nested,
        "quant_type": state.quant_type,
        "quant_storage": held.dtype,
    }
    again = Layer([layer], state.dtype, options).quantize(value.to(held.device))
    if not torch.equal(*(tensor.view(-1).view(torch.uint8) for tensor in (held, again))):
        raise ExportError(
            f"the 4-bit weights of {entry.name} are not those of {checkpoint}, so the adapter "
            "cannot be merged. Export it alone."
        )
    return value
