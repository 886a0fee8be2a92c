"""Converts a sharded checkpoint to a model directory, outside a training run.

The checkpoint's tensors are matched by name with the parameters of a model on meta, and divided among the processes. A LoRA
checkpoint becomes an adapter, or a merged model whose base weights are read chunk by chunk from the base model's files.
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed, parameter_names
from hf_fsdp_recipes.checkpointing import dcp_reader
from hf_fsdp_recipes.checkpointing.dcp_reader import DcpTensor
from hf_fsdp_recipes.checkpointing.resume import PARAMS_FILE, read_train_params
from hf_fsdp_recipes.errors import CheckpointError, ExportError, LoadError, summarize
from hf_fsdp_recipes.export import adapter_files, lora_merge, model_assets
from hf_fsdp_recipes.export.export_directory import check_base_model
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
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.export.write_export import check_arguments, write_export
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta, resolve_directory
from hf_fsdp_recipes.loading.dequantize import describe_dequantized, take_quantization
from hf_fsdp_recipes.loading.export_marker import check_files
from hf_fsdp_recipes.loading.read_ranges import read_elements
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, open_index
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, map_checkpoint, set_conversions

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from hf_fsdp_recipes.export.adapter_files import FileTensor

BaseWeights = tuple[SafetensorsIndex, dict[str, list[TensorRange]]]
ModelName = str | os.PathLike[str] | None


@distributed.ignore_launcher()
def export_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    base_model: ModelName = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    merge_adapter: bool = False,
    use_free_name: bool = False,
) -> Path:
    """Convert a sharded checkpoint to a directory that `from_pretrained` loads, outside a training run and without GPUs.

    Collective: every process must call this; any number of processes works. Reads in chunks, in constant memory.
    Accepts checkpoints of this package, of a stock Trainer or Accelerate (FSDP2 and FSDP1), plain directories of `.distcp`
    files, and exported adapters to merge.

    Args:
        checkpoint_dir: `checkpoint-<step>`, its `pytorch_model_fsdp_0`, any directory with a `.metadata` file, or, with
            `merge_adapter`, an exported adapter.
        output_dir: as in `export_model`.
        base_model: directory or Hub id of the model that has the config, the tokenizer and, to merge an adapter, the base
            weights. None uses what the checkpoint records: its own config, or the model that its train_params.yaml or
            adapter_config.json names.
        dtype: as in `export_model`.
        max_shard_size: as in `export_model`.
        merge_adapter: for a LoRA checkpoint or adapter, write the base model with the adapter merged in. An adapter
            trained on a 4-bit base is merged into the unquantized base.
        use_free_name: as in `export_model`.

    Returns:
        The export's directory: `output_dir`, or the free name used instead.

    Raises:
        ExportError: on every process, if the checkpoint cannot be read or does not match its manifest or model, the base
            model is unknown, `output_dir` exists and is not an export, or the disk is full.
    """
    # Resolve "." and links, because the checkpoint's name and parent directory are used.
    checkpoint, output = Path(os.path.realpath(checkpoint_dir)), Path(output_dir)
    check_arguments(
        checkpoint_dir=str(checkpoint_dir),
        output_dir=str(output),
        base_model=base_model,
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge_adapter=merge_adapter,
        use_free_name=use_free_name,
    )

    def describe() -> ExportPlan:
        try:
            return _describe(checkpoint, output, base_model, parse_dtype(dtype), merge_adapter)
        except (CheckpointError, LoadError) as error:
            raise ExportError(str(error)) from error

    return write_export(output, describe, max_shard_size, "auto", lambda: None, checkpoint, use_free_name)


def _describe(
    checkpoint: Path, output: Path, base_model: ModelName, dtype: torch.dtype | None, merge_adapter: bool
) -> ExportPlan:
    if (checkpoint / adapter_files.ADAPTER_CONFIG_FILE).is_file():
        return _describe_adapter_directory(checkpoint, output, base_model, dtype, merge_adapter)
    tensors = _without_prefix(dcp_reader.read_index(dcp_reader.find_directory(checkpoint)))
    params = read_train_params(checkpoint) or read_train_params(checkpoint.parent) or {}
    own_config = model_assets.find_directory(checkpoint, model_assets.CONFIG_FILE)
    own_tokenizer = model_assets.find_directory(checkpoint, model_assets.TOKENIZER_FILE)
    # llama-recipes names this field model_name.
    trained = str(params.get("model_name_or_path") or params.get("model_name") or "")
    name = str(base_model or trained)
    check_base_model(output, name)
    check_base_model(output, trained)
    is_adapter = any(parameter_names.is_adapter(tensor) or ".lora_" in tensor for tensor in tensors)
    if is_adapter and not merge_adapter:
        return _describe_adapter(tensors, params, name, dtype, own_tokenizer)
    if own_config is not None and base_model is None and not is_adapter:
        name = str(own_config)  # training may have added embeddings
    if not name:
        raise ExportError(
            f"{checkpoint} does not record its model. Pass base_model (--base-model): a directory or Hub id with its config "
            f"and tokenizer."
        )
    config = _adapter_config(params, name) if is_adapter else None
    model, base = _build(name, config, tensors)
    if base is not None:
        adapter = lora_merge.StoredAdapter(config, tensors, model, params["adapter_name"])
        return _describe_merged(adapter, model, base, name, dtype, own_tokenizer)
    return _describe_model(tensors, model, name, dtype, own_tokenizer)


def _describe_adapter_directory(
    directory: Path, output: Path, base_model: ModelName, dtype: torch.dtype | None, merge_adapter: bool
) -> ExportPlan:
    """Return the plan of an export that merges an exported adapter into its base model."""
    if not merge_adapter:
        raise ExportError(
            f"{directory} is already an exported adapter. Pass merge_adapter (--merge-adapter) to merge it."
        )
    check_files(directory)
    config, tensors = adapter_files.read_adapter(directory)
    name = str(base_model or config.base_model_name_or_path or "")
    if not name:
        raise ExportError(f"{directory} does not record its base model. Pass base_model (--base-model).")
    check_base_model(output, name)
    model, base = _build(name, config, tensors)
    assert base is not None
    return _describe_merged(lora_merge.StoredAdapter(config, tensors, model), model, base, name, dtype, directory)


def _without_prefix(tensors: dict[str, DcpTensor]) -> dict[str, DcpTensor]:
    """Remove wrappers from tensor names, and the prefix `model.` if it comes from a nested state dict and not from the model."""
    if tensors and all(name.startswith("model.") for name in tensors):
        inner = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        # The state dict is usually {"model": {...}}. If it is not, the model's own names may all begin with `model.`.
        if any(name.startswith(("model.", "transformer.", "base_model.", "lm_head.")) for name in inner):
            tensors = inner
    return {parameter_names.without_wrappers(name): tensor for name, tensor in tensors.items()}


def _build(
    name: str, adapter: "PeftConfig | None", tensors: "Mapping[str, DcpTensor | FileTensor]"
) -> tuple["PreTrainedModel", BaseWeights | None]:
    """Build a model on meta from its directory or Hub id. If there is an `adapter` to merge, also index the base weights."""
    from transformers import AutoConfig, GenerationConfig

    try:
        is_recorded = adapter is not None and adapter.base_model_name_or_path == name
        directory = resolve_directory(name, {"revision": adapter.revision if adapter and is_recorded else None})
        auto_class, fields = adapter_files.recorded_class(adapter, tensors) if adapter is not None else (None, {})
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, **fields)
        quantization, held = take_quantization(config, name), config.dtype or torch.bfloat16
        model = build_on_meta(config, torch.float32, auto_class=auto_class)
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
        if adapter is None:
            set_conversions(model)
            return model, None
        index = open_index(directory)
        index.tensors = describe_dequantized(index.tensors, quantization, held)
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        # The adapter may replace a layer of another shape, such as a head for other labels.
        ranges, _ = map_checkpoint(model, shapes, index.tensors, name, ignore_mismatched=True)
        return model, (index, ranges)
    except (LoadError, OSError, ValueError) as error:
        raise ExportError(f"the base model {name} cannot be used: {summarize(error, 'line')}") from error


def _own_count(number: int, count: int) -> int:
    """Return `count` if this process writes the parameter with index `number`, else 0."""
    return count if number % distributed.world_size() == distributed.rank() else 0


def _describe_model(
    tensors: Mapping[str, DcpTensor],
    model: "PreTrainedModel",
    name: str,
    dtype: torch.dtype | None,
    tokenizer_directory: Path | None,
) -> ExportPlan:
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    state = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    missing = sorted(set(state) - set(tensors) - tied)
    unexpected = sorted(set(tensors) - set(state))
    mismatched = [key for key in state if key in tensors and tensors[key].shape != state[key]]
    if missing or unexpected or mismatched:
        raise ExportError(
            f"the checkpoint does not match {name}: missing {missing[:3]}, unexpected {unexpected[:3]}, wrong shape "
            f"{mismatched[:3]}. Pass the trained model as base_model (--base-model)."
        )
    for key, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        both = [tensors[name] for name in (key, source) if name in tensors]
        if distributed.is_main() and len(both) == 2 and not lora_merge.is_equal(*both):
            raise ExportError(
                f"the checkpoint has a {key} of its own, but in {name} it is tied to {source}. Pass the trained model as "
                f"base_model (--base-model)."
            )
    shards = []
    written_shapes = {key: tensors[key].shape for key in state if key in tensors and key not in tied}
    for number, (key, parts) in enumerate(split_parameters(model, written_shapes).items()):
        tensor = tensors[key]
        count = _own_count(number, math.prod(tensor.shape))
        written = written_dtype(tensor.dtype, dtype)
        shards.append(ShardExport(key, tensor.shape, tensor.dtype, 0, count, parts, written, tensor.read))
    return ExportPlan(shards, model, MODEL_PATTERN, _model_assets(model, tokenizer_directory or name), Path(name))


def _model_assets(model: "PreTrainedModel", tokenizer: str | Path) -> Callable[[Path, FilePlan], None]:
    def write(directory: Path, plan: FilePlan) -> None:
        model_assets.save_configs(model, directory, plan.main_dtype())
        _copy_tokenizer(tokenizer, directory)

    return write


def _check_tokenizer(trained: Path, model: "PreTrainedModel", base: str) -> None:
    """Raise an ExportError if a merged model would lack embeddings for tokens that were added to its tokenizer for training."""
    from transformers import AutoTokenizer

    num_tokens = num_rows = 0
    with contextlib.suppress(OSError, ValueError, NotImplementedError):
        num_rows = model.get_input_embeddings().weight.shape[0]
        num_tokens = len(AutoTokenizer.from_pretrained(trained, trust_remote_code=False))
        if num_tokens > num_rows:
            num_rows = max(num_rows, len(AutoTokenizer.from_pretrained(base, trust_remote_code=False)))
    if num_tokens > num_rows:
        raise ExportError(
            f"{trained} has a tokenizer of {num_tokens:,} tokens, but the base model {base} has {num_rows:,} embeddings. Pass a "
            f"base model with the added embeddings, or merge the model in training with export_model."
        )


def _copy_tokenizer(name: str | Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(directory)
    except (OSError, ValueError) as error:
        distributed.print_main(f"note: exported without a tokenizer ({summarize(error, 'line')})")


def _describe_adapter(
    tensors: Mapping[str, DcpTensor],
    params: dict[str, Any],
    name: str,
    dtype: torch.dtype | None,
    tokenizer_directory: Path | None,
) -> ExportPlan:
    config = _adapter_config(params, name)
    shards = []
    for number, (key, tensor) in enumerate(tensors.items()):
        stored = parameter_names.without_adapter_name(key, params["adapter_name"])
        count = _own_count(number, math.prod(tensor.shape))
        written = written_dtype(tensor.dtype, dtype)
        parts = [full_range(stored, tensor.shape)]
        shards.append(ShardExport(key, tensor.shape, tensor.dtype, 0, count, parts, written, tensor.read))

    def write_assets(directory: Path, plan: FilePlan) -> None:
        config.save_pretrained(str(directory))
        if tokenizer_directory or name:
            _copy_tokenizer(tokenizer_directory or name, directory)

    return ExportPlan(shards, None, ADAPTER_PATTERN, write_assets)


def _adapter_config(params: dict[str, Any], name: str) -> "PeftConfig":
    """Return the PEFT config that a checkpoint recorded; raise an ExportError if it has none. A stock Trainer records none."""
    from peft import PeftConfig

    if "adapter" not in params:
        raise ExportError(
            f"the checkpoint holds an adapter, but no {PARAMS_FILE} with the adapter's PEFT config. Resume the run for one step "
            f"with ShardedCheckpointCallback, which records the config, and export the new checkpoint."
        )
    config = PeftConfig.from_peft_type(**params["adapter"])
    config.inference_mode = True
    if name and name != config.base_model_name_or_path:
        config.base_model_name_or_path, config.revision = name, None
    return config


def _describe_merged(
    adapter: lora_merge.StoredAdapter,
    model: "PreTrainedModel",
    base: BaseWeights,
    name: str,
    dtype: torch.dtype | None,
    tokenizer_directory: Path | None,
) -> ExportPlan:
    index, ranges = base
    adapter.check_fits(model)
    if tokenizer_directory is not None:
        _check_tokenizer(tokenizer_directory, model, name)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    shards = []
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items() if key not in tied}
    for number, (key, parts) in enumerate(split_parameters(model, shapes).items()):
        if key not in ranges and not adapter.replaces(key):
            raise ExportError(
                f"the base model {name} lacks {key} of shape {list(shapes[key])}. Pass the base model that the adapter was "
                f"trained on."
            )
        shape = shapes[key]
        held = index.tensors[ranges[key][0].tensor].dtype if key in ranges else adapter.copy_dtype(key)

        def read_base(start: int, count: int, key: str = key, held: torch.dtype = held) -> torch.Tensor:
            values = torch.empty(count, dtype=held)
            if not adapter.replaces(key):
                read_elements(index, ranges[key], start, values)
            return values

        def read(
            start: int,
            count: int,
            key: str = key,
            shape: tuple[int, ...] = shape,
            read_base: Callable[[int, int], torch.Tensor] = read_base,
        ) -> torch.Tensor:
            return adapter.merge(key, shape, start, read_base(start, count), read_base)

        count = _own_count(number, math.prod(shape))
        written = written_dtype(held, dtype)
        shards.append(ShardExport(key, shape, held, 0, count, parts, written, read))
    return ExportPlan(shards, model, MODEL_PATTERN, _model_assets(model, tokenizer_directory or name), Path(name))
