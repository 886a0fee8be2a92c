"""Parameters that the checkpoint does not hold: tied to one that it does, or initialised by the model itself.

Runs before any weight is read. What is initialised here lives on rank 0 until it is sent like the rest.
"""

import copy
import logging
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.safetensors_index import StoredTensor
from hf_fsdp_recipes.loading.weight_mapping import TensorRange

logger = logging.getLogger(__name__)
IN_MEMORY = Path("<initialised>")


def warn_main(message: str) -> None:
    """Log a warning on rank 0 only."""
    if distributed.is_main():
        logger.warning(message)


def prepare(model: Any, source: Any, is_new: bool = False) -> None:
    """Complete `source.pieces`: tied names share pieces, names that are missing get freshly made tensors.

    Every rank calls this, with the same model and source; no collective. The values are made on rank 0 only. Of a
    new model (`is_new`) everything is missing, which is nobody's surprise.

    Raises:
        LoadError: a tied pair that the checkpoint holds twice with different values, on the rank that reads.
    """
    groups = _groups_of_shared(model)
    for names in groups:
        _share_pieces(source, names)
    buffers = {name for name, _ in model.named_buffers()}
    absent = [name for name in model.state_dict() if name not in source.pieces and name not in buffers]
    made = [name for name in absent if not any(name in names and names[0] != name for names in groups)]
    if made:
        _initialise(model, source, made)
    if made and not is_new:
        warn_main(
            f"{source.name_or_path} lacks {len(made)} parameters, initialised on rank 0 by the model's own init: {made[:3]}"
        )
    for names in groups:
        _share_pieces(source, names)


def _groups_of_shared(model: Any) -> list[list[str]]:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _share_pieces(source: Any, names: list[str]) -> None:
    present = [name for name in names if name in source.pieces]
    if len(present) > 1:
        _check_equal(source, present)
    for name in names:
        if present:
            source.pieces[name] = source.pieces[present[0]]


def _check_equal(source: Any, names: list[str]) -> None:
    """Refuse a tied pair with two different values: whichever is taken, one of them would be wrong."""
    first, *others = (source.pieces[name] for name in names)
    for other in others:
        if other == first or source.checkpoint is None:
            continue
        tensors = [source.stored[pieces[0].tensor] for pieces in (first, other)]
        if not _bytes_equal(source.checkpoint, *tensors):
            raise LoadError(
                f"{names} are tied by the config of {source.name_or_path} but differ in its weights. Rule: one tensor, "
                f"one value. Remedy: pass tie_word_embeddings=False (they are two tensors) or mend the checkpoint."
            )


def _bytes_equal(checkpoint: Any, one: StoredTensor, other: StoredTensor, step: int = 16 * 1024 * 1024) -> bool:
    if one.num_bytes != other.num_bytes:
        return False
    for start in range(0, one.num_bytes, step):
        buffers = [torch.empty(min(step, one.num_bytes - start), dtype=torch.uint8) for _ in range(2)]
        for tensor, buffer in zip((one, other), buffers, strict=True):
            checkpoint.read_into(buffer, tensor, start)
        if not torch.equal(*buffers):
            return False
    return True


def _initialise(model: Any, source: Any, names: list[str]) -> None:
    """Make the missing parameters the way the model makes them, module by module."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        module_name, _, leaf = name.rpartition(".")
        by_module.setdefault(module_name, []).append(leaf)
    for module_name, leaves in by_module.items():
        module = model.get_submodule(module_name)
        real = None
        if distributed.is_main() or source.checkpoint is not None:
            real = copy.deepcopy(module)
            buffers = {n: b.clone() for n, b in real.named_buffers(recurse=False)}
            real.to_empty(device="cpu", recurse=False)
            for buffer_name, buffer in buffers.items():
                setattr(real, buffer_name, buffer)
            with torch.no_grad():
                model._init_weights(real)
        for leaf in leaves:
            _store(
                source, f"{module_name}.{leaf}", getattr(module, leaf), None if real is None else getattr(real, leaf)
            )


def _store(source: Any, name: str, meta: torch.Tensor, value: torch.Tensor | None) -> None:
    key = f"<initialised>{name}"
    source.pieces[name] = [TensorRange(key, tuple(meta.shape), 0, meta.numel())]
    num_bytes = meta.numel() * meta.dtype.itemsize
    source.stored[key] = StoredTensor(key, IN_MEMORY, meta.dtype, tuple(meta.shape), 0, num_bytes)
    if source.checkpoint is not None and value is not None:
        source.checkpoint.keep(source.stored[key], value.detach())
