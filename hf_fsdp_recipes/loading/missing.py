"""Handles parameters that are missing from the checkpoint: ties them to another, or initializes them.

Runs before any weight is read. New values stay on rank 0 until they are distributed like the others.
"""

import copy
import re
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.checkpoint_source import CheckpointSource
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def complete_ranges(
    model: "PreTrainedModel", source: CheckpointSource, is_new: bool = False, ignore_mismatched: bool = False
) -> None:
    """Complete `source.ranges`: tied names share ranges, missing names get newly initialized tensors.

    Every rank calls this with the same model; not a collective. Only rank 0 and ranks that read create values. `is_new`
    means that there is no checkpoint; with one, missing names are an error unless `ignore_mismatched`.

    Raises:
        LoadError: parameters or buffers are missing; or, on a reading rank, tied parameters differ in the checkpoint.
    """
    tied_groups = _find_tied_groups(model)
    for names in tied_groups:
        _share_ranges(source, names)
    aliases = {name for names in tied_groups for name in names[1:]}
    absent = [name for name in model.state_dict() if name not in source.ranges and name not in aliases]
    if not is_new:
        optional = model._keys_to_ignore_on_load_missing or ()
        lacking = [name for name in absent if not any(re.search(pattern, name) for pattern in optional)]
        check_complete(source.name_or_path, lacking, bool(source.ranges), ignore_mismatched)
    buffers = {name for name, _ in model.named_buffers()}
    _initialize(model, source, [name for name in absent if name not in buffers])
    for names in tied_groups:
        _share_ranges(source, names)


def check_complete(name_or_path: str, lacking: list[str], has_any: bool, ignore_mismatched: bool) -> None:
    """Raise a LoadError if a checkpoint lacks the model or parts of it; with `ignore_mismatched`, only warn about parts.

    Every rank calls this; not a collective.
    """
    if not has_any:
        raise LoadError(f"no tensor of {name_or_path} belongs to the model of its config. Check the config.json.")
    found = f"{name_or_path} lacks {len(lacking)} of the model's parameters and buffers: {', '.join(lacking[:3])}"
    if lacking and not ignore_mismatched:
        raise LoadError(
            f"{found}. Check that config.json belongs to the weights, or pass ignore_mismatched=True (in a recipe, "
            f"model_init_kwargs: {{ignore_mismatched: true}}) to initialize them."
        )
    if lacking:
        distributed.warn_main(f"{found}. They are newly initialized.")


def _find_tied_groups(model: torch.nn.Module) -> list[list[str]]:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _share_ranges(source: CheckpointSource, names: list[str]) -> None:
    present = [name for name in names if name in source.ranges]
    if len(present) > 1:
        _check_equal(source, present)
    for name in names:
        if present:
            source.ranges[name] = source.ranges[present[0]]


def _check_equal(source: CheckpointSource, names: list[str]) -> None:
    """Check that tied parameters have the same values in the checkpoint."""
    first, *others = (source.ranges[name] for name in names)
    for other in others:
        if other == first or source.index is None:
            continue
        one, two = (source.stored[ranges[0].tensor] for ranges in (first, other))
        if not _bytes_equal(source.index, one, two):
            raise LoadError(
                f"{names} are tied by the config of {source.name_or_path} but differ in its weights. Pass "
                f"tie_word_embeddings=False if they are meant to be two tensors, or repair the checkpoint."
            )


def _bytes_equal(index: SafetensorsIndex, one: StoredTensor, other: StoredTensor) -> bool:
    if one.num_bytes != other.num_bytes:
        return False
    step = 16 * 1024 * 1024
    for start in range(0, one.num_bytes, step):
        buffers = [torch.empty(min(step, one.num_bytes - start), dtype=torch.uint8) for _ in range(2)]
        for tensor, buffer in zip((one, other), buffers, strict=True):
            index.read_into(buffer, tensor, start)
        if not torch.equal(*buffers):
            return False
    return True


def _initialize(model: "PreTrainedModel", source: CheckpointSource, names: list[str]) -> None:
    """Initialize missing parameters as the model does, module by module."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        module_name, _, leaf = name.rpartition(".")
        by_module.setdefault(module_name, []).append(leaf)
    for module_name, leaves in by_module.items():
        module = model.get_submodule(module_name)
        real = None
        if distributed.is_main() or source.index is not None:
            real = copy.deepcopy(module)
            buffers = {n: b.clone() for n, b in real.named_buffers(recurse=False)}
            real.to_empty(device="cpu", recurse=False)
            for buffer_name, buffer in buffers.items():
                setattr(real, buffer_name, buffer)
            with torch.no_grad():
                model._init_weights(real)
        for leaf in leaves:
            name, meta = f"{module_name}.{leaf}", getattr(module, leaf)
            value = None if real is None else getattr(real, leaf).detach()
            source.ranges[name] = [source.add_tensor(f"<initialized>{name}", meta.dtype, tuple(meta.shape), value)]
