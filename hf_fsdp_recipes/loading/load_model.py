"""`load_model`: `from_pretrained` for FSDP, without a full model on any rank.

Global rank 0 reads the config and headers, and every rank builds the same model on meta. The weights are read when Accelerate
shards the model (`materialize.py`).
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.configs.launch import check_launch
from hf_fsdp_recipes.environment import is_fsdp_requested, is_true
from hf_fsdp_recipes.errors import LoadError, summarize
from hf_fsdp_recipes.loading import bnb_4bit, missing
from hf_fsdp_recipes.loading.build_on_meta import (
    build_on_meta,
    check_has_layers,
    read_config,
    resolve_directory,
    resolve_dtype,
)
from hf_fsdp_recipes.loading.checkpoint_source import CheckpointSource, Source, Verify
from hf_fsdp_recipes.loading.materialize import MetaModelLoader
from hf_fsdp_recipes.loading.safetensors_index import (
    DeferredErrorIndex,
    SafetensorsIndex,
    StoredTensor,
    open_index,
    read_header,
)
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, WeightMapping
from hf_fsdp_recipes.metrics import stages
from hf_fsdp_recipes.patches import cpu_ranks, registry
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_WHERE_FSDP_PLACES = "Remove it; FSDP places the weights, and the template's fsdp_offload_params keeps them on the CPU."
# Arguments of `from_pretrained` that have no effect, or a different one, under FSDP.
REFUSED_ARGUMENTS = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "offload_state_dict"), _WHERE_FSDP_PLACES),
    "low_cpu_mem_usage": "Remove it; load_model never holds more than a rank's shard.",
    "load_in_4bit": "Pass quantization_config=BitsAndBytesConfig(load_in_4bit=True).",
    "load_in_8bit": "Pass quantization_config=BitsAndBytesConfig(load_in_4bit=True); 8-bit weights cannot be sharded.",
    "ignore_mismatched_sizes": "Pass ignore_mismatched=True.",
    **dict.fromkeys(("tp_plan", "device_mesh"), "Remove it; tensor parallelism is not supported."),
}


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    source: Source = "rank0",
    verify: Verify = "sample",
    ignore_mismatched: bool = False,
    **from_pretrained_kwargs: Any,
) -> "PreTrainedModel":
    """Load a causal language model with no more host memory per rank than its shard and a small constant.

    Collective: every rank must call this. Turns on FSDP for CPU ranks if the launcher requests it.

    Args:
        name_or_path: a local directory or a Hub id, as in `from_pretrained`.
        source: which ranks read the weights. `rank0`: global rank 0 reads them and sends every rank its shard. `direct`:
            every rank reads its own byte ranges, so every rank needs access to the files. `auto`: `direct` if every rank
            sees rank 0's files, else `rank0`.
        verify: compare checksums of a `sample` of every shard, or of all of it (`full`).
        ignore_mismatched: initialize parameters that the checkpoint lacks or has in another shape, instead of refusing them.
        **from_pretrained_kwargs: as in `from_pretrained`: dtype, attn_implementation, revision, token, trust_remote_code,
            config, quantization_config (4-bit bitsandbytes; weights are quantized while they load), and overrides of
            config fields.

    Returns:
        The model. Under FSDP its parameters stay on meta until Accelerate prepares the model with its optimizer, which
        Trainer does in `train()`; buffers are real. Without FSDP it is what `from_pretrained` returns.

    Raises:
        LoadError: on every rank, before any weight is read, if the model does not exist, the checkpoint is pickled,
            truncated or inconsistent, parameters are missing or shapes differ from the config's, an argument is not
            supported, or a weight cannot be read shard by shard.
        TemplateError: the launch uses unsupported parallelism or precision.
    """
    if source not in get_args(Source) or verify not in get_args(Verify):
        raise LoadError(
            f"source is {source!r} and verify is {verify!r}. Use source rank0, direct or auto, and verify sample or full."
        )
    _prepare_process()
    if not is_fsdp_requested():
        return _load_without_fsdp(str(name_or_path), ignore_mismatched, from_pretrained_kwargs)
    faults = [
        f"{name}={from_pretrained_kwargs[name]!r} does not apply under FSDP. {cure}"
        for name, cure in REFUSED_ARGUMENTS.items()
        if from_pretrained_kwargs.get(name) not in (None, False)
    ]
    if faults:
        raise LoadError(" ".join(faults))
    with stages.record("build on meta"):
        return _load_on_meta(str(name_or_path), source, verify, ignore_mismatched, from_pretrained_kwargs)


def initialize_model(
    config_name: str, *, overrides: str | None = None, dtype: Any = "float32", **from_config_kwargs: Any
) -> "PreTrainedModel":
    """Build a causal language model with new weights, which rank 0 creates with the model's own init.

    Collective: every rank must call this. Rank 0 holds the full new model until it is sharded.

    Args:
        config_name: a config.json, a directory with one, or a Hub id.
        overrides: config fields to change, such as `hidden_size=768,num_hidden_layers=12`.
        dtype: dtype of the parameters.
        **from_config_kwargs: as in `AutoModelForCausalLM.from_config`: attn_implementation.

    Raises:
        LoadError: on every rank, if the config does not exist or an override is invalid.
    """
    _prepare_process()
    with distributed.sync_errors():
        config = read_config(config_name, overrides)
    attention = from_config_kwargs.get("attn_implementation")
    if attention is not None:
        config._attn_implementation = attention
    if not is_fsdp_requested():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(config, dtype=resolve_dtype(dtype, config, {}))
    with distributed.sync_errors(distributed.patient_group()):  # rank 0 initializes the weights
        model = build_on_meta(config, resolve_dtype(dtype, config, {}))
        found = CheckpointSource("the new model", DeferredErrorIndex(()) if distributed.is_main() else None, {}, {})
        missing.complete_ranges(model, found, is_new=True)
    MetaModelLoader(model, found).attach()
    return model


def _prepare_process() -> None:
    """Check the launch, start the process group and apply the patches that this run needs."""
    check_launch()
    wait_for_gloo_at_exit()
    cpu_ranks.enable()
    if distributed.world_size() > 1 and not distributed.is_distributed():
        from accelerate import PartialState

        PartialState(cpu=is_true(os.environ.get("ACCELERATE_USE_CPU", "false")))
    if is_fsdp_requested():
        registry.apply("size wrap")
        registry.apply("loading")


def _load_without_fsdp(name_or_path: str, ignore_mismatched: bool, kwargs: dict[str, Any]) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    kwargs = {"trust_remote_code": False, "ignore_mismatched_sizes": ignore_mismatched} | kwargs
    distributed.main_first(lambda: resolve_directory(name_or_path, kwargs))
    with distributed.sync_errors(distributed.patient_group()):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs, output_loading_info=True)
        except (OSError, ValueError) as error:
            raise LoadError(f"{name_or_path} cannot be loaded: {error}") from error
        lacking = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
        loaded = model.state_dict().keys() - set(lacking) - set(getattr(model, "all_tied_weights_keys", None) or {})
        missing.check_complete(name_or_path, lacking, bool(loaded), ignore_mismatched)
    return model


def _load_on_meta(
    name_or_path: str, source: Source, verify: Verify, ignore_mismatched: bool, kwargs: dict[str, Any]
) -> "PreTrainedModel":
    from transformers import GenerationConfig

    kwargs = {"trust_remote_code": False} | kwargs
    dtype = kwargs.pop("dtype", "auto")
    quantization = kwargs.pop("quantization_config", None)
    index: SafetensorsIndex | None = None

    def describe() -> tuple[Any, Any, dict[str, StoredTensor]]:
        nonlocal index
        directory = resolve_directory(name_or_path, kwargs)
        config = _read_config(name_or_path, directory, kwargs)
        generation_config = None
        if (directory / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(directory)
        index = open_index(directory)
        # Custom code exists only on ranks that have imported it, so objects of its classes cannot be broadcast.
        is_custom = kwargs["trust_remote_code"] and hasattr(config, "auto_map")
        return None if is_custom else config, generation_config, index.tensors

    # Rank 0 may have to download the model.
    config, generation_config, stored = distributed.run_on_main(describe, distributed.patient_group())
    if config is None:
        config = distributed.main_first(lambda: _read_custom_config(name_or_path, kwargs))
    is_direct = source == "direct" or (source == "auto" and _do_all_ranks_see(stored))
    directory = distributed.main_first(lambda: resolve_directory(name_or_path, kwargs)) if source == "direct" else None
    with distributed.sync_errors():
        dtype = resolve_dtype(dtype, config, stored)
        model = build_on_meta(config, dtype, kwargs["trust_remote_code"])
        quantizer = None
        if quantization is not None:
            quantizer = bnb_4bit.replace_linears(model, quantization, dtype)
        if generation_config is not None:
            model.generation_config = generation_config
        ranges = _map_ranges(model, stored, name_or_path, ignore_mismatched)
        if is_direct and index is None:
            index = SafetensorsIndex(stored.values()) if directory is None else open_index(directory)
        if not is_direct and index is not None:
            index = DeferredErrorIndex(index.tensors.values())
        found = CheckpointSource(name_or_path, index, stored, ranges, is_direct, verify)
        missing.complete_ranges(model, found, ignore_mismatched=ignore_mismatched)
        if quantizer is not None:
            found.quantized = bnb_4bit.pack_weights(model, quantizer, dtype)
    MetaModelLoader(model, found).attach()
    return model


def _read_custom_config(name_or_path: str, kwargs: dict[str, Any]) -> "PreTrainedConfig":
    """Read the config of a model with custom code, and import the code of the model."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = _read_config(name_or_path, resolve_directory(name_or_path, kwargs), kwargs)
    reference = config.auto_map.get("AutoModelForCausalLM")
    if reference is not None:
        get_class_from_dynamic_module(reference, name_or_path, revision=kwargs.get("revision"))
    return config


def _read_config(name_or_path: str, directory: Path, kwargs: dict[str, Any]) -> "PreTrainedConfig":
    from transformers import AutoConfig, PreTrainedConfig

    rest = {key: value for key, value in kwargs.items() if key not in (*REFUSED_ARGUMENTS, "revision", "token")}
    config = rest.pop("config", None)
    try:
        if not isinstance(config, PreTrainedConfig):
            config, unused = AutoConfig.from_pretrained(config or directory, return_unused_kwargs=True, **rest)
            unknown = sorted(set(unused) - {"attn_implementation", "trust_remote_code", "use_cache"})
            if unknown:
                raise LoadError(
                    f"{unknown} are neither from_pretrained arguments nor fields of {type(config).__name__}. Remove them."
                )
    except (OSError, ValueError) as error:
        raise LoadError(
            f"the config of {name_or_path} cannot be read: {summarize(error, 'sentence')}. Check its config.json, which "
            f"must have a model_type; a model with its own code needs trust_remote_code."
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise LoadError(
            f"{name_or_path} is already quantized, and packed weights cannot be sharded. Use the unquantized model and set "
            f"load_in_4bit, which quantizes while loading."
        )
    if "attn_implementation" in rest:
        config._attn_implementation = rest["attn_implementation"]
    config.name_or_path = name_or_path
    check_has_layers(config)
    return config


def _do_all_ranks_see(stored: dict[str, StoredTensor]) -> bool:
    """Return whether every rank sees rank 0's files, with the same headers. Collective."""
    by_file: dict[Path, dict[str, StoredTensor]] = {}
    for tensor in stored.values():
        by_file.setdefault(tensor.file, {})[tensor.name] = tensor
    try:
        sees = all(
            expected.items() <= {tensor.name: tensor for tensor in read_header(file)}.items()
            for file, expected in by_file.items()
        )
    except (OSError, LoadError):
        sees = False
    blind = [rank for rank, sees_files in enumerate(distributed.gather_objects(sees)) if not sees_files]
    decision = (
        f"ranks {blind[:3]} cannot see rank 0's files, so rank 0 reads for all" if blind else "every rank reads its own"
    )
    distributed.print_main(f"load: {decision}")
    return not blind


def _map_ranges(
    model: "PreTrainedModel", stored: dict[str, StoredTensor], name_or_path: str, ignore_mismatched: bool
) -> dict[str, list[TensorRange]]:
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    ranges, unexpected = WeightMapping(model).to_parameters({n: t.shape for n, t in stored.items()}, shapes)
    mismatched = {
        name: f"{name}: {list(stored[r[0].tensor].shape)} in the checkpoint, {list(shapes[name])} in the config"
        for name, r in ranges.items()
        if len(r) == 1
        and tuple(stored[r[0].tensor].shape) != shapes[name]
        and r[0].shape == stored[r[0].tensor].shape
        and r[0].num_elements != state[name].numel()
    }
    if mismatched and not ignore_mismatched:
        raise LoadError(
            f"{len(mismatched)} tensors of {name_or_path} do not have the shape in its config: "
            f"{'; '.join(list(mismatched.values())[:3])}. Check that config.json belongs to the weights, or pass "
            f"ignore_mismatched=True to initialize them."
        )
    ranges = {name: parts for name, parts in ranges.items() if name not in mismatched}
    unused = [name for name in unexpected if "rotary_emb.inv_freq" not in name and "position_ids" not in name]
    if unused:
        distributed.warn_main(
            f"{name_or_path}: {len(unused)} tensors match no parameter and are not loaded: {unused[:3]}"
        )
    return ranges
