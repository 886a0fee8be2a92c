"""Builds a model whose parameters are on meta on every rank; the weights arrive when Accelerate shards it.

`load_model` is from_pretrained for FSDP: global rank 0 reads headers, says what the checkpoint holds, and
every rank builds the same empty model around that. No weight is read here (`arrival.py` does that, into the
shards), and without FSDP this is plain from_pretrained.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading import bnb_4bit, missing, resize
from hf_fsdp_recipes.loading.bnb_4bit import Quant4bitSpec
from hf_fsdp_recipes.loading.safetensors_index import SafetensorsIndex, StoredTensor, open_checkpoint
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, WeightMapping
from hf_fsdp_recipes.metrics import stages
from hf_fsdp_recipes.patches import cpu_ranks, loading, wrapping

SOURCE_ATTRIBUTE = "_checkpoint_source"
# What a Hub download leaves out: weights in other formats than safetensors.
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass
class CheckpointSource:
    """What has to arrive in a model that was built on meta, and from where.

    Attributes:
        checkpoint: the files; only on ranks that read (rank 0, or every rank with `direct`).
        stored: what the checkpoint holds, on every rank.
        pieces: for each entry of the model's state dict, what fills it.
        verify: whether checksums cover a sample of every tensor or all of it.
        resized: how rows that were added to embeddings since are filled: mean or initialised; None for none.
        quantized: how each 4-bit weight is made of its pieces.
    """

    name_or_path: str
    checkpoint: SafetensorsIndex | None
    stored: dict[str, StoredTensor]
    pieces: dict[str, list[TensorRange]]
    source: Literal["rank0", "direct"] = "rank0"
    verify: Literal["sample", "full"] = "sample"
    resized: str | None = None
    quantized: dict[str, Quant4bitSpec] = field(default_factory=dict)


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    source: Literal["rank0", "direct"] = "rank0",
    verify: Literal["sample", "full"] = "sample",
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a causal language model so that no rank ever holds more than its shard and a small constant.

    Collective: every rank must call this. Turns on FSDP on CPU ranks when the launcher asked for that.

    Args:
        name_or_path: a local directory or a Hub id, as in `from_pretrained`.
        source: `rank0`, where global rank 0 alone reads the weights and sends every rank its slice, or
            `direct`, where each rank reads its own byte ranges (the files must be visible to all distributed).
        verify: checksums over a `sample` of every tensor's slice, or over all of it (`full`).
        **from_pretrained_kwargs: as in `from_pretrained`: dtype, attn_implementation, revision, token,
            trust_remote_code, config, quantization_config (4-bit bitsandbytes; weights are quantised on
            arrival), and overrides of config fields.

    Returns:
        A PreTrainedModel. Under FSDP its parameters are on meta and get their values, sharded, when
        Accelerate prepares the model with its optimizer (Trainer does that in `train`); non-persistent
        buffers are real. Without FSDP it is what `from_pretrained` returns.

    Raises:
        LoadError: the same on every rank, before anything is read: no such model, a pickled, truncated or
            lying checkpoint, shapes that differ from the config's, a conversion that cannot be read by slices.
    """
    if source not in ("rank0", "direct") or verify not in ("sample", "full"):
        raise LoadError(f"source={source!r}, verify={verify!r}. Rule: rank0 or direct; sample or full.")
    cpu_ranks.enable()
    _start_process_group()
    if not is_fsdp_asked_for():
        return _load_plainly(str(name_or_path), from_pretrained_kwargs)
    wrapping.install()
    loading.install()
    with stages.record("build on meta"):
        return _load_on_meta(str(name_or_path), source, verify, from_pretrained_kwargs)


def initialise_model(
    config_name: str, *, overrides: str | None = None, dtype: Any = "float32", **from_config_kwargs: Any
) -> Any:
    """Build a causal language model with new weights, made on rank 0 by the model's own init and sent out in slices.

    Collective: every rank must call this. Rank 0 holds the whole new model until it is sharded.

    Args:
        config_name: a config.json, a directory with one, or a Hub id.
        overrides: changes to the config, `hidden_size=768,num_hidden_layers=12`.
        dtype: of the parameters.
        **from_config_kwargs: as in `AutoModelForCausalLM.from_config`: attn_implementation.

    Raises:
        LoadError: the same on every rank: no such config, or a field that it does not have.
    """
    cpu_ranks.enable()
    _start_process_group()
    config = None
    with distributed.sync_errors():
        config = read_config(config_name, overrides)
    given = {key: value for key, value in from_config_kwargs.items() if value is not None}
    if "attn_implementation" in given:
        config._attn_implementation = given["attn_implementation"]
    if not is_fsdp_asked_for():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(config, dtype=resolve_dtype(dtype, config, {}))
    wrapping.install()
    loading.install()
    model = None
    with distributed.sync_errors():
        model = build_on_meta(config, resolve_dtype(dtype, config, {}))
        source = CheckpointSource("the new model", SafetensorsIndex(()) if distributed.is_main() else None, {}, {})
        missing.prepare(model, source, is_new=True)
    setattr(model, SOURCE_ATTRIBUTE, source)
    resize.track_resize(model, source)
    return model


def read_config(name: str, overrides: str | None = None) -> Any:
    """Read a config from a file, a directory or the Hub, and change fields of it. Any rank; no collective.

    Raises:
        LoadError: no such config, or a field that it does not have.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
        if overrides:
            config.update_from_string(overrides)
            config = type(config).from_dict(config.to_dict())  # checks the whole again
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise LoadError(
            f"the config {name} (config_overrides: {overrides}) cannot be used: {str(error).splitlines()[-1].strip()}"
        ) from error
    return config


def is_fsdp_asked_for() -> bool:
    """Tell whether the launcher or TrainingArguments turned on FSDP through Accelerate."""
    return cpu_ranks.is_true(os.environ.get("ACCELERATE_USE_FSDP", "false"))


def _start_process_group() -> None:
    if distributed.world_size() > 1 and not distributed.is_distributed():
        from accelerate import PartialState

        PartialState(cpu=cpu_ranks.is_true(os.environ.get("ACCELERATE_USE_CPU", "false")))


def _load_plainly(name_or_path: str, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    model = None
    with distributed.sync_errors():
        resolve_directory(name_or_path, kwargs)
        try:
            model = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
        except (OSError, ValueError) as error:
            raise LoadError(f"{name_or_path} cannot be loaded: {error}") from error
    return model


def _load_on_meta(name_or_path: str, source: Any, verify: Any, kwargs: dict[str, Any]) -> Any:
    kwargs = dict(kwargs)
    dtype = kwargs.pop("dtype", "auto")
    quantization = kwargs.pop("quantization_config", None)
    checkpoint: SafetensorsIndex | None = None

    def describe() -> tuple[Any, Any, dict[str, StoredTensor]]:
        nonlocal checkpoint
        config, generation_config, checkpoint = _describe(name_or_path, kwargs)
        return config, generation_config, checkpoint.tensors

    config, generation_config, stored = distributed.run_on_main(describe)
    model = found = None
    with distributed.sync_errors():
        dtype = resolve_dtype(dtype, config, stored)
        model = build_on_meta(config, dtype, kwargs.get("trust_remote_code", False))
        quantizer = None
        if quantization is not None:
            quantization = bnb_4bit.prepare_config(quantization, dtype)
            quantizer = bnb_4bit.replace_linears(model, quantization, dtype)
        if generation_config is not None:
            model.generation_config = generation_config
        pieces = _map_pieces(model, stored, name_or_path)
        if source == "direct" and checkpoint is None:
            checkpoint = open_checkpoint(resolve_directory(name_or_path, kwargs))
        found = CheckpointSource(name_or_path, checkpoint, stored, pieces, source, verify)
        missing.prepare(model, found)
        if quantizer is not None:
            found.quantized = bnb_4bit.pack(model, quantizer, dtype)
    setattr(model, SOURCE_ATTRIBUTE, found)
    resize.track_resize(model, found)
    return model


def _describe(name_or_path: str, kwargs: dict[str, Any]) -> tuple[Any, Any, SafetensorsIndex]:
    """Read config, generation config and weight headers. Main rank only."""
    from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

    directory = resolve_directory(name_or_path, kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("device_map", "low_cpu_mem_usage", "revision", "token")}
    config = rest.pop("config", None)
    try:
        if not isinstance(config, PreTrainedConfig):
            config, unused = AutoConfig.from_pretrained(config or directory, return_unused_kwargs=True, **rest)
            unknown = sorted(set(unused) - {"attn_implementation", "trust_remote_code", "use_cache"})
            if unknown:
                raise LoadError(
                    f"{unknown} are neither from_pretrained arguments nor fields of {type(config).__name__}"
                )
    except (OSError, ValueError) as error:
        raise LoadError(f"the config of {name_or_path} cannot be read: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise LoadError(
            f"{name_or_path} is quantised already, and its packed weights cannot be sharded as they are. Rule: weights are "
            f"quantised on arrival. Remedy: name the unquantised model and set load_in_4bit."
        )
    if "attn_implementation" in rest:
        config._attn_implementation = rest["attn_implementation"]
    config.name_or_path = name_or_path
    generation_config = None
    if (directory / "generation_config.json").is_file():
        generation_config = GenerationConfig.from_pretrained(directory)
    return config, generation_config, open_checkpoint(directory)


def resolve_directory(name_or_path: str, kwargs: dict[str, Any]) -> Path:
    """Return the local directory of a model, downloading it where it is a Hub id."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path) / (kwargs.get("subfolder") or "")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name_or_path, allow_patterns=HUB_PATTERNS, revision=kwargs.get("revision"), token=kwargs.get("token")
            )
        )
    except HFValidationError as error:
        raise LoadError(f"{name_or_path} is neither a directory nor a Hub id. Remedy: check the path.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise LoadError(
            f"{name_or_path} is no directory here and could not be fetched from the Hub: {str(error).splitlines()[0]} "
            f"Remedy: check the name, the network and, for a gated model, the token."
        ) from error


def resolve_dtype(dtype: Any, config: Any, stored: dict[str, StoredTensor]) -> torch.dtype:
    """Return the parameters' dtype as `from_pretrained` would choose it."""
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise LoadError("dtype must be auto, float32, bfloat16, float16 or a torch.dtype")
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return torch.get_default_dtype()
    if isinstance(getattr(config, "dtype", None), torch.dtype):
        return config.dtype
    return next((tensor.dtype for tensor in stored.values() if tensor.dtype.is_floating_point), torch.float32)


def build_on_meta(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Build the causal language model of a config with meta parameters and real buffers. No collective."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError) as error:
        raise LoadError(f"a {config.model_type!r} model cannot be built: {error}") from error
    _initialise_buffers(model)
    model.tie_weights()  # moving each parameter to meta as it is registered has undone the ties
    for pattern, kept_dtype in model._get_dtype_plan(dtype).items():
        for name, parameter in model.named_parameters():
            if pattern in name:
                parameter.data = parameter.data.to(kept_dtype)
    return model.eval()


def _initialise_buffers(model: Any) -> None:
    """Run the model's own init where it can matter: weights on meta have no values, buffers do."""
    for module in model.modules():
        module._is_hf_initialized = next(module.buffers(recurse=False), None) is None
    model.initialize_weights()


def _map_pieces(model: Any, stored: dict[str, StoredTensor], name_or_path: str) -> dict[str, list[TensorRange]]:
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    pieces, unexpected = WeightMapping(model).to_parameters({n: t.shape for n, t in stored.items()}, shapes)
    wrong = [
        f"{name}: {list(stored[p[0].tensor].shape)} in the checkpoint, {list(shapes[name])} by the config"
        for name, p in pieces.items()
        if len(p) == 1
        and tuple(stored[p[0].tensor].shape) != shapes[name]
        and p[0].shape == stored[p[0].tensor].shape
        and p[0].num_elements != state[name].numel()
    ]
    if wrong:
        raise LoadError(
            f"{len(wrong)} tensors of {name_or_path} have another shape than its config says: {'; '.join(wrong[:3])}. "
            f"Remedy: check that config.json belongs to the weights."
        )
    ignored = [name for name in unexpected if "rotary_emb.inv_freq" not in name and "position_ids" not in name]
    if ignored:
        missing.warn_main(f"{name_or_path}: {len(ignored)} tensors fit nowhere and stay unread: {ignored[:3]}")
    return pieces
