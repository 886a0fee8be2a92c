"""Merges a PEFT adapter into its base model, one layer at a time. PEFT's own code merges full tensors in float32."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel
from transformers import PreTrainedModel

from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.sources import Source, from_files, on_meta
from hf_fsdp_recipes.export.steps import (
    Plan,
    Step,
    Tensors,
    copy_step,
    plan_in_file_format,
    rename_outputs,
)
from hf_fsdp_recipes.loading.checkpoint import Checkpoint

PREFIX = "base_model.model."  # PEFT's name for the transformers model inside a PeftModel
# With these values of init_lora_weights, PEFT changes the base weights when it adds the adapter.
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


def plan_merge(
    model: PreTrainedModel,
    adapted: PeftModel,
    base_names: Mapping[str, str],
    sources: Mapping[str, Source],
    dtype: torch.dtype | None,
) -> Plan:
    """Return a plan that merges an adapter into the base weights it was trained on. `sources` has all tensors of `adapted`."""
    steps = {
        name: step for step in _merge_steps(model, adapted, sources, dtype) for name in step.outputs
    }
    for key, name in base_names.items():
        if name not in steps:
            meta = sources[key].meta
            steps[name] = copy_step(name, on_meta(meta.shape, meta.dtype, dtype), key)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = [name for name in model.state_dict() if name in steps and name not in tied]
    return plan_in_file_format(model, names, dict.fromkeys(steps[name] for name in names), sources)


def plan_merge_into_files(
    model: PreTrainedModel,
    adapted: PeftModel,
    base_names: Mapping[str, str],
    adapter: Mapping[str, Source],
    base: str | os.PathLike[str],
    dtype: torch.dtype | None,
) -> Plan:
    """Return a plan that merges an adapter into the weights of `base`, a directory or Hub id. Their names are kept."""
    start = str(getattr(adapted.active_peft_config, "init_lora_weights", "")).lower()
    if start.startswith(
        CHANGES_BASE
    ):  # then the files do not have the weights that the adapter was trained on
        raise ExportError(
            f"init_lora_weights={start} changed the base weights. Merge in training, with export_model."
        )
    checkpoint = Checkpoint(
        Path(base) if Path(base).is_dir() else Path(snapshot_download(os.fspath(base)))
    )
    files, stored = from_files(checkpoint), checkpoint.match(model)
    bases = {key: files[stored[name]] for key, name in base_names.items() if name in stored}
    steps = [
        rename_outputs(step, stored)
        for step in _merge_steps(model, adapted, {**adapter, **bases}, dtype)
    ]
    merged = {name: value for step in steps for name, value in step.outputs.items()}
    outputs = {
        name: merged.get(name, on_meta(source.meta.shape, source.meta.dtype, dtype))
        for name, source in files.items()
    }
    steps += [copy_step(name, value, name) for name, value in outputs.items() if name not in merged]
    return Plan(steps, {**adapter, **bases, **files}, outputs)


def _merge_steps(
    model: PreTrainedModel,
    adapted: PeftModel,
    sources: Mapping[str, Source],
    dtype: torch.dtype | None,
) -> list[Step]:
    """Return one step for each layer that the adapter changes. A step's outputs have the names of parameters in `model`."""
    steps = []
    for path, layer in _find_layers(adapted.get_submodule(PREFIX[:-1])).items():
        inputs = [f"{PREFIX}{path}.{name}" for name in layer.state_dict()]
        if missing := [name for name in inputs if name not in sources]:
            raise ExportError(
                f"{missing[0]} is not one tensor of the base model. If its files hold it in several tensors, such as "
                f"experts, merge in training, with export_model."
            )
        steps.append(_merge_step(path, layer, {name: sources[name].meta for name in inputs}, dtype))
    merged = {name for step in steps for name in step.outputs}
    for name, tied in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if merged & {name, tied}:
            raise ExportError(
                f"{name} and {tied} are tied, and the adapter changes one. Export the adapter instead."
            )
    return steps


def _find_layers(model: torch.nn.Module, prefix: str = "") -> dict[str, torch.nn.Module]:
    """Return {path: module} for the outermost modules that PEFT has inserted, as `merge_and_unload` finds them."""
    found = {}
    for name, child in model.named_children():
        if hasattr(child, "unload_and_optionally_merge_module") or hasattr(child, "base_layer"):
            found[prefix + name] = child
        else:
            found |= _find_layers(child, f"{prefix}{name}.")
    return found


def _merge_step(
    path: str, layer: torch.nn.Module, meta: Tensors, dtype: torch.dtype | None
) -> Step:
    prefix = f"{PREFIX}{path}."

    def merge(tensors: Tensors) -> Tensors:
        merged = _merge(
            copy.deepcopy(layer),
            {name.removeprefix(prefix): value for name, value in tensors.items()},
        )
        return {f"{path}.{name}": value for name, value in merged.items()}

    def merge_in_float32(tensors: Tensors) -> Tensors:
        # The adapter may be on an accelerator while base weights from files are on the CPU.
        device = max(
            (value.device for value in tensors.values()), key=lambda device: device.type != "cpu"
        )
        floating = {
            name: torch.float32 if value.is_floating_point() else None
            for name, value in tensors.items()
        }
        return merge({name: value.to(device, floating[name]) for name, value in tensors.items()})

    outputs = {
        name: on_meta(value.shape, value.dtype, dtype) for name, value in merge(meta).items()
    }
    return Step(tuple(meta), outputs, merge_in_float32)


def _merge(layer: torch.nn.Module, tensors: Tensors) -> Tensors:
    """Return the state dict of the module that `merge_and_unload` puts in place of `layer`."""
    layer.load_state_dict(tensors, assign=True)
    # A safe merge does not change its input, which may be the model's own tensor. But it cannot check meta tensors for NaN.
    is_safe = not any(value.is_meta for value in tensors.values())
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=is_safe, adapter_names=None
        ).state_dict()
    layer.merge(safe_merge=is_safe)
    return layer.get_base_layer().state_dict()
