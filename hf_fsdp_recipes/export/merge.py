"""Merges a PEFT adapter into its base model, one layer at a time.

PEFT's own code merges full tensors in float32.
"""

from copy import deepcopy
from typing import Any

import torch
from peft import PeftModel
from torch.nn import Module
from transformers import AutoConfig

from hf_fsdp_recipes.errors import ExportError, explained
from hf_fsdp_recipes.export.files import OptionalDtype, PathLike, Tensors
from hf_fsdp_recipes.export.shells import AdaptedShell
from hf_fsdp_recipes.export.sources import Sources, from_weights, on_meta
from hf_fsdp_recipes.export.steps import (
    Plan,
    Step,
    copy_step,
    plan_in_file_format,
)
from hf_fsdp_recipes.loading.checkpoint import Checkpoint
from hf_fsdp_recipes.loading.load_model import take_quantizer
from hf_fsdp_recipes.upstream.torch_internals import checkpoint_name
from hf_fsdp_recipes.upstream.transformers_internals import find_tied
from hf_fsdp_recipes.weights.files import find_model

PREFIX = "base_model.model."  # PEFT's name for the transformers model inside a PeftModel
BASE_LAYER = ".base_layer."  # PEFT's name for a layer inside an adapter
# With these values of init_lora_weights, PEFT changes the base weights when it adds the adapter.
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


def plan_merge(
    shell: AdaptedShell,
    sources: Sources,
    dtype: OptionalDtype,
) -> Plan:
    """Return a plan that merges an adapter into the base weights it was trained on.

    `sources` has all tensors of the model with the adapter.
    """
    state = shell.base.state_dict()
    steps = {name: step for step in _merge_steps(shell, sources, dtype) for name in step.outputs}
    for key, name in shell.base_names.items():
        if sources[key].meta.shape != state[name].shape:
            raise ExportError(f"{name} has another shape than the model's config says.")
        steps.setdefault(name, copy_step(name, key, sources[key], dtype))
    ordered = dict.fromkeys(
        steps[name] for name in state if name in steps and name not in find_tied(shell.base)
    )
    return plan_in_file_format(shell.base, list(ordered), sources)


def from_base(
    base: PathLike,
    revision: str | None,
    shell: AdaptedShell,
) -> Sources:
    """Return the weights of `base`, a directory or Hub id, by their names in the adapted shell.

    Raise an ExportError if the adapter was trained on other weights.
    """
    start = str(getattr(shell.adapted.active_peft_config, "init_lora_weights", "")).lower()
    if start.startswith(CHANGES_BASE):
        raise ExportError(
            f"init_lora_weights={start} changed the base weights. "
            "Merge in training, with export_model."
        )
    config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=False)
    _, files = find_model(str(base), {"revision": revision})
    checkpoint = Checkpoint(files, take_quantizer(config))
    if checkpoint.quantizer:
        shell.base.to(config.dtype)  # dequantized weights are rounded to it before they are merged
    weights = from_weights(checkpoint, shell.base)
    return {key: weights[name] for key, name in shell.base_names.items()}


def by_shell_names(
    model: PeftModel,
    shell: AdaptedShell,
    held: Sources,
) -> Sources:
    """Return a model's tensors under their names in a shell, which has only the active adapter.

    Layers that have other adapters have other names in the model. Raise an ExportError if the model
    has other layers than its config says.
    """
    expected = shell.adapted.state_dict()
    base_names = {name.replace(BASE_LAYER, "."): name for name in shell.base_names}

    def shell_name(name: str) -> str | None:
        return name if name in expected else base_names.get(name.replace(BASE_LAYER, "."))

    sources = {shell_name(name): source for name, source in held.items()}
    others = model.peft_config.keys() - {model.active_adapter}
    wrong = list(expected.keys() - sources.keys())
    for name, _ in model.named_parameters(remove_duplicate=False):
        own_name = checkpoint_name(model, name)
        if not shell_name(own_name) and others.isdisjoint(own_name.split(".")):
            wrong.append(own_name)
    if wrong:
        raise ExportError(
            f"the layers do not fit the model's config: {sorted(wrong)[:3]}. Export the adapter "
            "alone, or change the config too."
        )
    return {name: source for name, source in sources.items() if name}


def _merge_steps(
    shell: AdaptedShell,
    sources: Sources,
    dtype: OptionalDtype,
) -> list[Step]:
    """Return one step for each layer that the adapter changes."""
    if getattr(shell.adapted.active_peft_config, "layer_replication", None):
        raise ExportError(
            "an adapter with layer_replication cannot be merged here. Export it alone, and "
            "merge it with PEFT."
        )
    steps = []
    layers = _find_layers(shell.adapted.get_base_model())
    for pair in find_tied(shell.base).items():
        if any(name.rpartition(".")[0] in layers for name in pair):
            raise ExportError(
                f"{' and '.join(pair)} are tied, and the adapter changes one. "
                "Export the adapter instead."
            )
    for path, layer in layers.items():
        metas = {}
        for name in layer.state_dict():
            key = f"{PREFIX}{path}.{name}"
            if key not in sources:
                raise ExportError(
                    f"{key} is not saved with the adapter, which is needed to merge it. Merge in "
                    "training, with export_model."
                )
            metas[name] = sources[key].meta
        steps.append(_merge_step(path, layer, metas, dtype))
    if not steps:
        raise ExportError("PEFT cannot merge an adapter of this type. Leave out merge_adapter.")
    return steps


def _find_layers(model: Module, prefix: str = "") -> dict[str, Module]:
    """Return {path: module} for the outermost modules that PEFT has inserted.

    `merge_and_unload` finds them in the same way.
    """
    layers = {}
    for name, child in model.named_children():
        if hasattr(child, "unload_and_optionally_merge_module") or hasattr(child, "base_layer"):
            layers[prefix + name] = child
        else:
            layers |= _find_layers(child, f"{prefix}{name}.")
    return layers


def _merge_step(
    path: str,
    layer: Module,
    metas: Tensors,
    dtype: OptionalDtype,
) -> Step:
    """Return the step of one layer. `metas` is the layer's state dict on meta."""
    prefix = f"{PREFIX}{path}."
    problem = (
        f"the adapter of {path} cannot be merged here (if it fits this model, export it alone, and "
        "merge it with PEFT if PEFT can)"
    )

    def merge(state: Tensors) -> Tensors:
        with explained(ExportError, problem):
            merged = _merge(deepcopy(layer), state)
        return {f"{path}.{name}": value for name, value in merged.items()}

    def merge_in_float32(tensors: Tensors) -> Tensors:
        # The adapter may be on an accelerator while base weights from files are on the CPU.
        devices = (value.device for value in tensors.values() if not value.is_cpu)
        device = next(devices, "cpu")
        state = {}
        for key, value in tensors.items():
            merge_dtype = on_meta(value, torch.float32).dtype
            state[key.removeprefix(prefix)] = value.to(device, merge_dtype)
        return merge(state)

    return Step(
        [prefix + name for name in metas],
        {name: on_meta(value, dtype) for name, value in merge(metas).items()},
        merge_in_float32,
    )


def _merge(layer: Any, state: Tensors) -> Tensors:
    """Return the state dict of the module that `merge_and_unload` puts in place of `layer`."""
    layer.load_state_dict(state, assign=True)
    for name, _ in list(layer.named_buffers()):
        if name not in state:  # then it has no values here, and must not be used
            path, _, buffer = name.rpartition(".")
            delattr(layer.get_submodule(path), buffer)
    # A safe merge does not change its input, which may be the model's own tensor. But it cannot
    # check meta tensors for NaN.
    is_safe = not any(value.is_meta for value in state.values())
    if hasattr(layer, "unload_and_optionally_merge_module"):
        # PEFT's classes with this method share no base class.
        return layer.unload_and_optionally_merge_module(
            merge=True,
            safe_merge=is_safe,
            adapter_names=None,
        ).state_dict()
    layer.merge(safe_merge=is_safe)
    return layer.get_base_layer().state_dict()
