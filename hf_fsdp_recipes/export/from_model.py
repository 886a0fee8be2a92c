"""FULL_STATE_DICT as Hugging Face safetensors, from a model in training or from a sharded checkpoint.

A rank's slice of a row-major tensor is one contiguous run of the safetensors file, so every rank writes its
own: no gather, no second copy, disk speed (`writing.py`). Here is where the values come from.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import dcp_reader
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export import lora_merge, model_assets
from hf_fsdp_recipes.export.slices import Slice, local_slices
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.export.write_export import (
    ExportPlan,
    Method,
    ShardExport,
    as_dtype,
    parts_of,
    whole_part,
    write_export,
)
from hf_fsdp_recipes.loading import weight_mapping

MODEL_PATTERN = "model{suffix}.safetensors"


def export_model(
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    method: Method = "auto",
    tokenizer: Any = None,
    merge_adapter: bool = False,
) -> Path:
    """Write a model, sharded or not, as a directory that `from_pretrained` and vLLM load.

    Collective: every rank must call this, with the same arguments. The model is not changed.

    Args:
        model: FSDP2, FSDP1 or plain; with PEFT adapters only the adapter is written, unless `merge_adapter`.
        output_dir: appears when the export is complete; an earlier export there is replaced then.
        dtype: floating-point dtype to cast to while writing; None keeps the parameters' own.
        max_shard_size: bytes or "5GB", as in `save_pretrained`.
        method: `direct`, every rank writes its slices into shared files; `gather`, rank 0 writes what the
            others send it; `auto` tries whether all ranks see the same storage.
        tokenizer: saved beside the weights, with its chat template.
        merge_adapter: write the base model with the LoRA weights added in.

    Returns:
        `output_dir`.

    Raises:
        ExportError: the same on every rank: no room, no permission, something else in the way, a conversion
            that cannot be written by slices, or a failed check. Nothing is left under the final name.
    """
    target = as_dtype(dtype)
    merger: lora_merge.Merger | None = None
    with distributed.sync_errors():
        merger = lora_merge.Merger(model) if merge_adapter else None

    def describe() -> ExportPlan:
        return _describe_model(model, target, tokenizer, merger)

    prepare = merger.gather if merger is not None else lambda: None
    return write_export(Path(output_dir), describe, max_shard_size, method, prepare)


def _describe_model(
    model: torch.nn.Module, dtype: torch.dtype | None, tokenizer: Any, merger: "lora_merge.Merger | None"
) -> ExportPlan:
    transformers_model = _transformers_model(model)
    weight_mapping.remember(transformers_model)
    slices = local_slices(model)
    if lora_merge.has_adapter(model) and merger is None:
        stored_names = lora_merge.stored_names(model, slices)
        outgoing = [
            _outgoing(slices[name], [whole_part(stored, slices[name].shape)], dtype)
            for name, stored in stored_names.items()
        ]

        def write_adapter_companions(directory: Path, plan: FilePlan) -> None:
            lora_merge.save_config(model, directory)
            _save_tokenizer(tokenizer, directory)

        return ExportPlan(outgoing, transformers_model, lora_merge.ADAPTER_PATTERN, write_adapter_companions, True)
    outgoing = [
        _outgoing(piece, parts_of(transformers_model, piece.name, piece.shape), dtype, merger)
        for piece in slices.values()
        if not lora_merge.is_left_out(piece.name)
    ]

    def write_companions(directory: Path, plan: FilePlan) -> None:
        save_config(transformers_model, directory, plan)
        _save_tokenizer(tokenizer, directory)

    return ExportPlan(outgoing, transformers_model, MODEL_PATTERN, write_companions)


def _transformers_model(model: torch.nn.Module) -> Any:
    """Find the PreTrainedModel inside FSDP1, torch.compile and PEFT wrappers."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ExportError(
        f"{type(model).__name__} holds no transformers model. Rule: export_model writes PreTrainedModels."
    )


def _outgoing(
    piece: Slice, parts: list[Any], dtype: torch.dtype | None, merger: "lora_merge.Merger | None" = None
) -> ShardExport:
    def chunk(start: int, count: int) -> torch.Tensor:
        values = piece.values[start : start + count]
        return merger.merged(piece, start, values) if merger is not None else values

    written = written_dtype(piece.dtype, dtype)
    return ShardExport(piece.name, piece.shape, piece.dtype, piece.first, piece.values.numel(), parts, written, chunk)


def written_dtype(held: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return what a tensor is written as: integers stay what they are."""
    return wanted if wanted is not None and held.is_floating_point else held


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def save_config(transformers_model: Any, directory: Path, plan: FilePlan) -> None:
    """Write config and generation config, as they are for inference. Main rank only."""
    written: Mapping[torch.dtype, int] = _bytes_by_dtype(plan)
    model_assets.save_configs(transformers_model, directory, max(written, key=lambda dtype: written[dtype]))


def _bytes_by_dtype(plan: FilePlan) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for tensor in plan.tensors.values():
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
    return sizes


def export_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    base_model: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    merge_adapter: bool = False,
) -> Path:
    """Write a sharded checkpoint as a directory that `from_pretrained` loads; offline, without GPUs.

    Collective if there are several processes (any number, whatever number wrote the checkpoint): every one
    must call this. Reads ranges, never the whole. Takes checkpoints of this package, of a stock Trainer or
    Accelerate (FSDP2 and FSDP1), plain directories of `.distcp` files, and, to merge them, exported adapters.

    Args:
        checkpoint_dir: `checkpoint-<step>`, its `pytorch_model_fsdp_0`, any directory with a `.metadata`, or
            with `merge_adapter` one with an `adapter_config.json`.
        output_dir: appears when the export is complete.
        base_model: directory or Hub id that config and tokenizer come from, and the base weights when merging;
            None takes what the checkpoint's train_params.yaml names.
        dtype, max_shard_size: as in `export_model`.
        merge_adapter: for a LoRA checkpoint or adapter, write the base model with the adapter added in. An
            adapter trained on a 4-bit base is merged into the base as it is in its files.

    Raises:
        ExportError: the same on every process: not such a checkpoint, one that does not fit its model, no base
            model, no room.
    """
    from hf_fsdp_recipes.export import from_checkpoint

    target = as_dtype(dtype)

    def describe() -> ExportPlan:
        return from_checkpoint.describe(Path(checkpoint_dir), base_model, target, merge_adapter)

    try:
        return write_export(Path(output_dir), describe, max_shard_size, "auto", lambda: None)
    finally:
        dcp_reader.close_all()
