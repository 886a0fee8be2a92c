"""`export_model`: FULL_STATE_DICT as Hugging Face safetensors, from a model in training.

A rank's part of a row-major tensor is one contiguous range of the safetensors file, so every rank writes its own: no gather,
no second copy, disk speed.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export import lora_merge, model_assets
from hf_fsdp_recipes.export.export_plan import (
    ADAPTER_PATTERN,
    MODEL_PATTERN,
    ExportPlan,
    ShardExport,
    full_range,
    parse_dtype,
    split_parameter,
    written_dtype,
)
from hf_fsdp_recipes.export.slices import local_slices
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.export.write_export import Method, write_export
from hf_fsdp_recipes.loading.shard_layout import Slice
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, set_conversions
from hf_fsdp_recipes.peft_models import has_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export_model(
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    method: Method = "auto",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    merge_adapter: bool = False,
) -> Path:
    """Write a model, sharded or not, as a directory that `from_pretrained` and vLLM load.

    Collective: every rank must call this, with the same arguments. The model is not changed.

    Args:
        model: FSDP2, FSDP1 or plain. With PEFT adapters only the adapter is written, unless `merge_adapter`.
        output_dir: appears when the export is complete, and replaces an earlier export then.
        dtype: floating-point dtype to cast to while writing; None keeps the parameters' own.
        max_shard_size: bytes or "5GB", as in `save_pretrained`.
        method: `direct`: every rank writes its part into shared files. `gather`: rank 0 writes what the others send.
            `auto`: `direct` if all ranks see the same storage, else `gather`.
        tokenizer: saved next to the weights, with its chat template.
        merge_adapter: write the base model with the LoRA weights merged in.

    Returns:
        `output_dir`.

    Raises:
        ExportError: the same on every rank: no space, no permission, `output_dir` is not an export, a weight cannot be
            written shard by shard, or a check failed. Nothing is left under the final name.
    """
    target_dtype = parse_dtype(dtype)
    with distributed.sync_errors():
        merger = lora_merge.ShardMerger(model) if merge_adapter else None

    def describe() -> ExportPlan:
        return _describe(model, target_dtype, tokenizer, merger)

    prepare = merger.gather if merger is not None else lambda: None
    return write_export(Path(output_dir), describe, max_shard_size, method, prepare)


def _describe(
    model: torch.nn.Module,
    dtype: torch.dtype | None,
    tokenizer: "PreTrainedTokenizerBase | None",
    merger: lora_merge.ShardMerger | None,
) -> ExportPlan:
    base = _find_transformers_model(model)
    set_conversions(base)
    slices = local_slices(model)
    is_adapter = has_adapter(model) and merger is None
    if is_adapter:
        stored_names = lora_merge.stored_names(model, slices)
        shards = [
            _shard(slices[name], [full_range(stored, slices[name].shape)], dtype)
            for name, stored in stored_names.items()
        ]
    else:
        shards = [
            _shard(piece, split_parameter(base, piece.name, piece.shape), dtype, merger)
            for piece in slices.values()
            if not lora_merge.is_merged_or_unused(piece.name)
        ]

    def write_assets(directory: Path, plan: FilePlan) -> None:
        if is_adapter:
            lora_merge.save_config(model, directory)
        else:
            model_assets.save_configs(base, directory, plan.main_dtype())
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)

    return ExportPlan(
        shards, None if is_adapter else base, ADAPTER_PATTERN if is_adapter else MODEL_PATTERN, write_assets
    )


def _find_transformers_model(model: torch.nn.Module) -> "PreTrainedModel":
    """Find the PreTrainedModel inside FSDP1, torch.compile and PEFT wrappers."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ExportError(f"{type(model).__name__} holds no transformers model; export_model writes PreTrainedModels only.")


def _shard(
    piece: Slice, parts: list[TensorRange], dtype: torch.dtype | None, merger: lora_merge.ShardMerger | None = None
) -> ShardExport:
    def read(start: int, count: int) -> torch.Tensor:
        values = piece.values[start : start + count]
        return merger.merge(piece, start, values) if merger is not None else values

    written = written_dtype(piece.dtype, dtype)
    return ShardExport(piece.name, piece.shape, piece.dtype, piece.first, piece.values.numel(), parts, written, read)
