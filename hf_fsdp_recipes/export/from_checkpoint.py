"""What goes out when the source is a sharded checkpoint: its tensors matched by name with a model on meta.

Several processes share the work tensor by tensor. A LoRA checkpoint becomes an adapter, or a merged model
whose base weights are read from the base model's own files, chunk by chunk.
"""

import math
from pathlib import Path
from typing import Any

import torch
import yaml

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import dcp_reader
from hf_fsdp_recipes.checkpointing.dcp_reader import DcpTensor
from hf_fsdp_recipes.errors import ExportError, LoadError
from hf_fsdp_recipes.export import lora_merge, model_assets
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.export.write_export import ExportPlan, ShardExport, parts_of, whole_part
from hf_fsdp_recipes.loading import names


def describe(checkpoint: Path, base_model: Any, dtype: torch.dtype | None, merge_adapter: bool) -> ExportPlan:
    """Return what this process writes of a checkpoint. No collective.

    Raises:
        ExportError: the checkpoint, its model or the two together are not what they should be.
    """
    if (checkpoint / "adapter_config.json").is_file():
        return _describe_adapter_directory(checkpoint, base_model, dtype, merge_adapter)
    tensors = _without_prefix(dcp_reader.read_index(dcp_reader.find_directory(checkpoint)))
    params = _train_params(checkpoint)
    own_config = model_assets.find_directory(checkpoint, model_assets.CONFIG_FILE)
    own_tokenizer = model_assets.find_directory(checkpoint, model_assets.TOKENIZER_FILE)
    # llama-recipes calls it model_name.
    name = str(base_model or params.get("model_name_or_path") or params.get("model_name") or "")
    is_adapter = any(names.is_adapter(tensor) or ".lora_" in tensor for tensor in tensors)
    if is_adapter and not merge_adapter:
        return _describe_adapter(tensors, params, name, dtype, own_tokenizer)
    if own_config is not None and base_model is None and not is_adapter:
        name = str(own_config)  # training may have grown the embeddings
    if not name:
        raise ExportError(
            f"{checkpoint} does not say which model it is of. Remedy: name it, base_model= (--base-model): a directory or "
            f"Hub id with its config and tokenizer."
        )
    model, base = _build(name, read_weights=is_adapter)
    if is_adapter:
        adapter = lora_merge.StoredAdapter(_adapter_config(params, name), tensors, params["adapter_name"])
        return _describe_merged(adapter, model, base, name, dtype, own_tokenizer)
    return _describe_model(tensors, model, name, dtype, own_tokenizer)


def _describe_adapter_directory(
    directory: Path, base_model: Any, dtype: torch.dtype | None, merge_adapter: bool
) -> ExportPlan:
    """Describe the merge of an exported adapter into its base model."""
    if not merge_adapter:
        raise ExportError(
            f"{directory} is an exported adapter already. Remedy: merge_adapter (--merge-adapter) merges it."
        )
    config, tensors = lora_merge.read_adapter(directory)
    name = str(base_model or config.base_model_name_or_path or "")
    if not name:
        raise ExportError(f"{directory} does not say what it adapts. Remedy: base_model= (--base-model).")
    model, base = _build(name, read_weights=True)
    return _describe_merged(lora_merge.StoredAdapter(config, tensors), model, base, name, dtype, directory)


def _train_params(checkpoint: Path) -> dict[str, Any]:
    for directory in (checkpoint, checkpoint.parent):
        try:
            found = yaml.safe_load((directory / "train_params.yaml").read_text())
        except (OSError, yaml.YAMLError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _without_prefix(tensors: dict[str, DcpTensor]) -> dict[str, DcpTensor]:
    """Drop the name of the state dict's own entry (`model.`) and of wrappers, where every tensor has it."""
    if tensors and all(name.startswith("model.") for name in tensors):
        inner = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        # {"model": {...}} is the rule; a bare state dict of a model whose parts are all below `model` is not stripped.
        if any(name.startswith(("model.", "transformer.", "base_model.", "lm_head.")) for name in inner):
            tensors = inner
    return {names.without_wrappers(name): tensor for name, tensor in tensors.items()}


def _build(name: str, read_weights: bool) -> tuple[Any, Any]:
    """Build the model of a directory or Hub id on meta; open its weights where they are needed."""
    from transformers import AutoConfig, GenerationConfig

    from hf_fsdp_recipes.loading import load_model
    from hf_fsdp_recipes.loading.safetensors_index import open_checkpoint
    from hf_fsdp_recipes.loading.weight_mapping import WeightMapping, remember

    try:
        directory = load_model.resolve_directory(name, {})
        config = AutoConfig.from_pretrained(directory)
        model = load_model.build_on_meta(config, torch.float32)
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
        if not read_weights:
            remember(model)
            return model, None
        base = open_checkpoint(directory)
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        pieces, _ = WeightMapping(model).to_parameters({k: t.shape for k, t in base.tensors.items()}, shapes)
        return model, (base, pieces)
    except (LoadError, OSError, ValueError) as error:
        raise ExportError(f"the base model {name} cannot be used: {str(error).splitlines()[0]}") from error


def _share(number: int, count: int) -> int:
    """Return how many of `count` elements this process brings of the parameter with this number: all or none."""
    return count if number % distributed.world_size() == distributed.rank() else 0


def _describe_model(
    tensors: dict[str, DcpTensor], model: Any, name: str, dtype: torch.dtype | None, tokenizer_directory: Path | None
) -> ExportPlan:
    from hf_fsdp_recipes.export.from_model import MODEL_PATTERN, written_dtype

    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    state = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    lacking = sorted(set(state) - set(tensors) - tied)
    foreign = sorted(set(tensors) - set(state))
    wrong = [k for k in state if k in tensors and tensors[k].shape != state[k]]
    if lacking or foreign or wrong:
        raise ExportError(
            f"the checkpoint is not of {name}: it lacks {lacking[:3]}, has {foreign[:3]} beside, and {wrong[:3]} of another "
            f"shape. Remedy: name the model that was trained, base_model=."
        )
    outgoing = []
    for number, key in enumerate(key for key in state if key in tensors and key not in tied):
        tensor = tensors[key]
        count = _share(number, math.prod(tensor.shape))
        written = written_dtype(tensor.dtype, dtype)
        parts = parts_of(model, key, tensor.shape)
        outgoing.append(ShardExport(key, tensor.shape, tensor.dtype, 0, count, parts, written, tensor.read))
    return ExportPlan(outgoing, model, MODEL_PATTERN, _model_companions(model, tokenizer_directory or name))


def _model_companions(model: Any, name: str | Path) -> Any:
    def write(directory: Path, plan: FilePlan) -> None:
        from hf_fsdp_recipes.export.from_model import save_config

        save_config(model, directory, plan)
        _copy_tokenizer(name, directory)

    return write


def _copy_tokenizer(name: str | Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(name).save_pretrained(directory)
    except (OSError, ValueError) as error:
        distributed.print_main(f"note: no tokenizer beside the weights ({str(error).splitlines()[0]})")


def _describe_adapter(
    tensors: dict[str, DcpTensor],
    params: dict[str, Any],
    name: str,
    dtype: torch.dtype | None,
    tokenizer_directory: Path | None,
) -> ExportPlan:
    from hf_fsdp_recipes.export.from_model import written_dtype

    config = _adapter_config(params, name)
    outgoing = []
    for number, (key, tensor) in enumerate(tensors.items()):
        stored = _stored_adapter_name(key, params["adapter_name"])
        count = _share(number, math.prod(tensor.shape))
        written = written_dtype(tensor.dtype, dtype)
        parts = [whole_part(stored, tensor.shape)]
        outgoing.append(ShardExport(key, tensor.shape, tensor.dtype, 0, count, parts, written, tensor.read))

    def write(directory: Path, plan: FilePlan) -> None:
        config.save_pretrained(str(directory))
        if tokenizer_directory or name:
            _copy_tokenizer(tokenizer_directory or name, directory)

    return ExportPlan(outgoing, None, lora_merge.ADAPTER_PATTERN, write, is_adapter_only=True)


def _adapter_config(params: dict[str, Any], name: str) -> Any:
    """Return the PEFT config that the checkpoint recorded.

    Raises:
        ExportError: it recorded none, as a stock Trainer's does.
    """
    from peft import PeftConfig

    if "adapter" not in params:
        raise ExportError(
            "the checkpoint holds an adapter and no train_params.yaml with its PEFT config. Remedy: resume it for a step with "
            "ShardedCheckpointCallback, or write adapter_config.json by hand."
        )
    config = PeftConfig.from_peft_type(**params["adapter"])
    config.inference_mode = True
    config.base_model_name_or_path = name or config.base_model_name_or_path
    return config


def _stored_adapter_name(key: str, adapter_name: str) -> str:
    """Return PEFT's file name of an adapter tensor; FSDP1 checkpoints keep the adapter's name in theirs."""
    return key.replace(f".modules_to_save.{adapter_name}.", ".").replace(f".{adapter_name}.", ".")


def _describe_merged(
    adapter: "lora_merge.StoredAdapter",
    model: Any,
    base: Any,
    name: str,
    dtype: torch.dtype | None,
    tokenizer_directory: Path | None = None,
) -> ExportPlan:
    from hf_fsdp_recipes.export.from_model import MODEL_PATTERN, written_dtype
    from hf_fsdp_recipes.loading.shard_layout import as_bytes, read_run

    checkpoint, pieces = base
    adapter.check_fits({key: tuple(value.shape) for key, value in model.state_dict().items()})
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    outgoing = []
    for number, (key, value) in enumerate((k, v) for k, v in model.state_dict().items() if k not in tied):
        if key not in pieces:
            raise ExportError(f"the base model {name} lacks {key}")
        shape, held = tuple(value.shape), checkpoint.tensors[pieces[key][0].tensor].dtype

        def chunk(start: int, count: int, key: str = key, shape: Any = shape, held: torch.dtype = held) -> torch.Tensor:
            values = torch.empty(count, dtype=held)
            read_run(checkpoint, pieces[key], held.itemsize, start, as_bytes(values))
            return adapter.merged(key, shape, start, values)

        count = _share(number, math.prod(shape))
        parts, written = parts_of(model, key, shape), written_dtype(held, dtype)
        outgoing.append(ShardExport(key, shape, held, 0, count, parts, written, chunk))
    return ExportPlan(outgoing, model, MODEL_PATTERN, _model_companions(model, tokenizer_directory or name))
