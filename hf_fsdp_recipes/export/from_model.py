"""Exports a model in training to Hugging Face safetensors, without gathering a FULL_STATE_DICT.

A rank's shard of a row-major tensor is a contiguous range of the safetensors file, so every rank writes its own shard at disk
speed, without a gather or a second copy.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export import adapter_files, lora_merge, model_assets
from hf_fsdp_recipes.export.export_directory import check_base_model, check_target
from hf_fsdp_recipes.export.export_plan import (
    ADAPTER_PATTERN,
    MODEL_PATTERN,
    ExportPlan,
    ShardExport,
    full_range,
    parse_dtype,
    split_parameters,
    written_dtype,
)
from hf_fsdp_recipes.export.slices import local_slices
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.export.write_export import Method, check_arguments, write_export
from hf_fsdp_recipes.loading.shard_layout import Slice
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, set_conversions
from hf_fsdp_recipes.peft_models import find_peft_model, has_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@distributed.ignore_launcher()
def export_model(
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    method: Method = "auto",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    merge_adapter: bool = False,
    use_free_name: bool = False,
) -> Path:
    """Write a model, sharded or not, as a directory that `from_pretrained` and vLLM load.

    Collective: every rank must call this, with the same arguments. The model is not changed.

    Args:
        model: an FSDP2, FSDP1, DDP or plain model. With a PEFT adapter, only the adapter is written, unless `merge_adapter` is set.
        output_dir: directory that appears when the export is complete. An earlier export there is replaced if the
            directory holds no other files.
        dtype: floating-point dtype to cast to while writing; None keeps each parameter's dtype.
        max_shard_size: maximum size of a file, in bytes or as a string such as "5GB"; as in `save_pretrained`.
        method: `direct`: every rank writes its shards to shared files. `gather`: rank 0 receives and writes all shards.
            `auto`: `direct` if all ranks see the same storage, else `gather`.
        tokenizer: saved next to the weights, with its chat template.
        merge_adapter: write the base model with the LoRA weights merged in.
        use_free_name: if `output_dir` exists and cannot be replaced, write to the first free `<output_dir>-<n>` and log a
            warning, so that the weights are not lost at the end of a run.

    Returns:
        The export's directory: `output_dir`, or the free name used instead.

    Raises:
        ExportError: on every rank. An argument is invalid or differs between ranks, disk space or a permission is missing,
            `output_dir` already exists and cannot be replaced, a weight cannot be written shard by shard, or verification
            failed. `output_dir` is then unchanged.
    """
    directory = Path(output_dir)
    check_arguments(
        method,
        output_dir=str(directory),
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge_adapter=merge_adapter,
        use_free_name=use_free_name,
    )
    model = _without_data_parallel(model)
    with distributed.sync_errors():
        target_dtype = parse_dtype(dtype)
        merger = lora_merge.ShardMerger(model) if merge_adapter else None

    def describe() -> ExportPlan:
        return _describe(model, directory, target_dtype, tokenizer, merger)

    prepare = merger.gather if merger is not None else lambda: None
    return write_export(directory, describe, max_shard_size, method, prepare, use_free_name=use_free_name)


@distributed.ignore_launcher()
def check_export(
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    merge_adapter: bool = False,
    other_bytes: int = 0,
    use_free_name: bool = False,
) -> int:
    """Check before training that `export_model` can write a model; return the export's size in bytes.

    Collective: every rank must call this. The model may be on meta, sharded or not. `other_bytes` is the size of other exports
    that need room on the same disk; the remaining arguments and the errors are the same as in `export_model`.
    """
    check_arguments(output_dir=str(output_dir), max_shard_size=max_shard_size)
    model = _without_data_parallel(model)
    with distributed.sync_errors():
        merger = lora_merge.ShardMerger(model) if merge_adapter else None
        shards = _describe(model, output_dir, parse_dtype(dtype), None, merger).shards
        num_bytes = sum(math.prod(shard.shape) * shard.dtype.itemsize for shard in shards)
        if distributed.is_main():
            check_target(output_dir, max_shard_size, num_bytes + other_bytes, use_free_name=use_free_name)
    return num_bytes


def _without_data_parallel(model: torch.nn.Module) -> torch.nn.Module:
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return model.module if isinstance(model, wrappers) else model


def _describe(
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | None,
    tokenizer: "PreTrainedTokenizerBase | None",
    merger: lora_merge.ShardMerger | None,
) -> ExportPlan:
    base = _find_transformers_model(model)
    check_base_model(output_dir, base.config.name_or_path)
    set_conversions(base)
    peft_model = find_peft_model(model)
    if peft_model is not None and len(peft_model.active_adapters) > 1:
        raise ExportError(
            f"the adapters {peft_model.active_adapters} are active, and an export holds one. Choose it with set_adapter."
        )
    slices = local_slices(model)
    is_adapter = has_adapter(model) and merger is None
    if is_adapter:
        stored_names = adapter_files.stored_names(model, slices)
        adapter_files.warn_of_new_embeddings(base, stored_names)
        shards = [
            _shard(slices[name], [full_range(stored, slices[name].shape)], dtype)
            for stored, name in stored_names.items()
        ]
    else:
        written = {name: slices[name] for name in lora_merge.choose_written(model, slices)}
        parts = split_parameters(base, {name: piece.shape for name, piece in written.items()})
        shards = [_shard(piece, parts[name], dtype, merger) for name, piece in written.items()]

    def write_assets(directory: Path, plan: FilePlan) -> None:
        if is_adapter:
            adapter_files.save_config(model, directory)
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
    raise ExportError(
        f"{type(model).__name__} contains no transformers model; export_model only writes PreTrainedModels."
    )


def _shard(
    own: Slice, parts: list[TensorRange], dtype: torch.dtype | None, merger: lora_merge.ShardMerger | None = None
) -> ShardExport:
    def read(start: int, count: int) -> torch.Tensor:
        values = own.values[start : start + count]
        return merger.merge(own, start, values) if merger is not None else values

    written = written_dtype(own.dtype, dtype)
    return ShardExport(own.name, own.shape, own.dtype, own.first, own.values.numel(), parts, written, read)
