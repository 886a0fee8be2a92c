"""`load_model`: `from_pretrained` for FSDP, without a full model on any rank.

Global rank 0 reads the config and the headers of the weight files, and every rank builds the same model on meta. The weights are
read when Accelerate shards the model (`materialize.py`).
"""

import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from hf_fsdp_recipes import distributed, model_class
from hf_fsdp_recipes.configs.launch import check_launch
from hf_fsdp_recipes.environment import is_fsdp_requested, is_true
from hf_fsdp_recipes.errors import UNREADABLE, LoadError, summarize
from hf_fsdp_recipes.loading import bnb_4bit, missing
from hf_fsdp_recipes.loading.build_on_meta import (
    build_on_meta,
    check_has_layers,
    read_config,
    resolve_directory,
    resolve_dtype,
)
from hf_fsdp_recipes.loading.checkpoint_source import CheckpointSource, Source, Verify
from hf_fsdp_recipes.loading.dequantize import dequantizing_arguments, describe_dequantized, take_quantization
from hf_fsdp_recipes.loading.export_marker import check_together
from hf_fsdp_recipes.loading.hub_kernels import take_arguments
from hf_fsdp_recipes.loading.materialize import MetaModelLoader
from hf_fsdp_recipes.loading.safetensors_index import (
    SafetensorsIndex,
    StoredTensor,
    open_index,
    read_header,
)
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, map_checkpoint, set_conversions
from hf_fsdp_recipes.metrics import stages
from hf_fsdp_recipes.patches import cpu_ranks, registry, trl
from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

    Description = tuple[
        PreTrainedConfig | None,
        QuantizationConfigMixin | None,
        GenerationConfig | None,
        dict[str, StoredTensor],
        torch.Tensor,
    ]


_WHERE_FSDP_PLACES = "Remove it; FSDP places the weights. The template's fsdp_offload_params keeps them on the CPU."
# Arguments of `from_pretrained` that have no effect, or a different one, under FSDP.
REFUSED_ARGUMENTS = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "offload_state_dict"), _WHERE_FSDP_PLACES),
    "low_cpu_mem_usage": "Remove it; load_model never holds more than a rank's shard.",
    "load_in_4bit": "Pass quantization_config=BitsAndBytesConfig(load_in_4bit=True).",
    "load_in_8bit": "Pass quantization_config=BitsAndBytesConfig(load_in_4bit=True); 8-bit weights cannot be sharded.",
    "ignore_mismatched_sizes": "Pass ignore_mismatched=True.",
    "distributed_config": "Remove it; the template shards the model.",
    **dict.fromkeys(("tp_plan", "device_mesh"), "Remove it; tensor parallelism is not supported."),
}


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    source: Source = "rank0",
    verify: Verify = "sample",
    ignore_mismatched: bool = False,
    auto_class: model_class.AutoClass = None,
    **from_pretrained_kwargs: Any,
) -> "PreTrainedModel":
    """Load a language model with no more host memory per rank than the rank's shard and a small constant.

    Collective: every rank must call this. Turns on FSDP for CPU ranks if the launcher requests it.

    Args:
        name_or_path: a local directory or a Hub id, as in `from_pretrained`.
        source: which ranks read the weights. `rank0`: global rank 0 reads them for all ranks. `direct`:
            every rank reads its own byte ranges, so every rank needs access to the files. `auto`: `direct` if every rank
            sees rank 0's files, else `rank0`.
        verify: how much of every tensor is read again and compared with every rank's shards: `sample`, a few hundred
            elements, or `full`, all of them. Shards that ranks read themselves (`direct`) are not compared.
        ignore_mismatched: initialize parameters that the checkpoint lacks or has in another shape, instead of raising an error.
        auto_class: class to load, as a class or its name: AutoModelForCausalLM, AutoModelForImageTextToText,
            AutoModelForSequenceClassification, AutoModelForTokenClassification, or a model class. None means the class that
            the checkpoint's config declares in `architectures`, or AutoModelForCausalLM if transformers lacks that class. A
            classifier's head is newly initialized if the checkpoint is of another class.
        **from_pretrained_kwargs: as in `from_pretrained`: dtype, attn_implementation, experts_implementation, revision, token,
            trust_remote_code, config, use_kernels, kernel_config, allow_all_kernels, quantization_config (4-bit
            bitsandbytes; weights are quantized while they load), and overrides of config fields. FP8 and
            MXFP4 checkpoints are always dequantized to `dtype` while they load.

    Returns:
        The model. Under FSDP its parameters stay on meta until Accelerate prepares the model with its optimizer, which
        Trainer does in `train()`; buffers are real. Without FSDP, it is the model from `from_pretrained`.

    Raises:
        LoadError: on every rank, before any weight is read. An argument is not supported, or the model does not exist. The
            checkpoint is pickled, truncated, inconsistent, a PEFT adapter, or an export that has changed. A parameter is
            missing, has the wrong shape, or cannot be read shard by shard. The class cannot be trained, or it is only the text
            part of a larger model and `auto_class` does not request it.
        TemplateError: the launch uses unsupported parallelism or precision.
    """
    _check_experts(from_pretrained_kwargs.get("experts_implementation"))
    if source not in get_args(Source) or verify not in get_args(Verify):
        raise LoadError(
            f"source is {source!r} and verify is {verify!r}. Use source rank0, direct or auto, and verify sample or full."
        )
    _prepare_process()
    if not is_fsdp_requested():
        return _load_without_fsdp(str(name_or_path), ignore_mismatched, auto_class, from_pretrained_kwargs)
    faults = [
        f"{name}={from_pretrained_kwargs[name]!r} does not apply under FSDP. {cure}"
        for name, cure in REFUSED_ARGUMENTS.items()
        if from_pretrained_kwargs.get(name) not in (None, False)
    ]
    if faults:
        raise LoadError(" ".join(faults))
    with stages.record("build on meta"):
        return _load_on_meta(str(name_or_path), source, verify, ignore_mismatched, auto_class, from_pretrained_kwargs)


def initialize_model(
    config_name: str,
    *,
    overrides: str | None = None,
    dtype: str | torch.dtype = "float32",
    auto_class: model_class.AutoClass = None,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
) -> "PreTrainedModel":
    """Build a model from its config, with new weights that the model's own code initializes.

    Collective: every rank must call this. Rank 0 creates the weights module by module while it sends them to the shards, so
    no rank holds the full new model. The weights do not depend on the number of ranks.

    Args:
        config_name: a config.json, a directory with one, or a Hub id.
        overrides: config fields to change, such as `hidden_size=768,num_hidden_layers=12`.
        dtype: dtype of the parameters.
        auto_class: as in `load_model`. If the config declares a model without a head, a causal language model is built.
        attn_implementation: as in `from_config`.
        experts_implementation: as in `from_config`.

    Raises:
        LoadError: on every rank, if the config does not exist, or if an override, the dtype, the class or an implementation is
            invalid.
    """
    _check_experts(experts_implementation)
    _prepare_process()
    with distributed.sync_errors():
        config = read_config(config_name, overrides)
        auto_class = model_class.for_new_model(config, auto_class)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    if experts_implementation is not None:
        config._experts_implementation = experts_implementation
    if not is_fsdp_requested():
        return model_class.build(config, auto_class, dtype=resolve_dtype(dtype, config, {}))
    with distributed.sync_errors():
        model = build_on_meta(config, resolve_dtype(dtype, config, {}), auto_class=auto_class)
        found = CheckpointSource("the new model", SafetensorsIndex(()) if distributed.is_main() else None, {}, {})
        missing.complete_ranges(model, found, is_new=True)
    MetaModelLoader(model, found).attach()
    return model


def _check_experts(implementation: str | dict[str, str] | None) -> None:
    """Raise a LoadError if transformers lacks an experts_implementation (one name, or a dict with a name per model part)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    known = ["eager", *sorted(ALL_EXPERTS_FUNCTIONS)]
    names = implementation.values() if isinstance(implementation, dict) else [implementation]
    if not all(name is None or name in known for name in names):
        raise LoadError(f"experts_implementation is {implementation!r}. Use {', '.join(known[:-1])} or {known[-1]}.")


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
        trl.load_hooks[:] = [load_model]


def refuse_adapter(name_or_path: str, directory: Path) -> None:
    """Raise a LoadError if a model's directory holds a PEFT adapter, which is not loaded under FSDP.

    Without FSDP, transformers loads the adapter onto its base model, and the run's own adapter would then silently replace it.
    """
    if (directory / "adapter_config.json").is_file():
        raise LoadError(
            f"{name_or_path} is a PEFT adapter, not a full model. Merge it into its base model with hf-fsdp "
            f"export {directory} merged --merge-adapter, and use the merged model."
        )


def _load_without_fsdp(
    name_or_path: str, ignore_mismatched: bool, auto_class: model_class.AutoClass, kwargs: dict[str, Any]
) -> "PreTrainedModel":
    from safetensors import SafetensorError
    from transformers import AutoConfig, PreTrainedConfig

    kwargs = {"trust_remote_code": False, "ignore_mismatched_sizes": ignore_mismatched} | kwargs
    directory = distributed.main_first(lambda: resolve_directory(name_or_path, kwargs))
    adapter_file = directory / "adapter_config.json"
    with distributed.sync_errors():
        try:
            is_adapter = adapter_file.is_file() and not (directory / "config.json").is_file()
            adapter = dict(json.loads(adapter_file.read_text())) if is_adapter else {}
        except UNREADABLE as error:
            raise LoadError(f"{adapter_file} cannot be read ({error!r}). Export or copy the adapter again.") from error
    base = adapter.get("base_model_name_or_path")  # transformers loads the adapter onto this model
    check_together(Path(name_or_path, kwargs.get("subfolder") or ""), is_read_by_all=True)
    # Ranks may see different copies, but all of them must call check_together.
    if distributed.first_rank(bool(base)) is not None:
        check_together(base or directory, is_read_by_all=True)
    if adapter.get("revision") and Path(name_or_path).is_dir():
        kwargs.setdefault("revision", adapter["revision"])  # the base model's revision
    with distributed.sync_errors(distributed.patient_group()):
        try:
            config = kwargs.get("config")
            if not isinstance(config, PreTrainedConfig):
                hub = {key: kwargs[key] for key in ("revision", "token", "trust_remote_code") if key in kwargs}
                config = AutoConfig.from_pretrained(config or base or directory, **hub)
                config.name_or_path = name_or_path
            declared = model_class.declared_class(config)
            chosen, part = model_class.choose_class(config, auto_class, kwargs["trust_remote_code"])
            if part is not config:
                kwargs["config"] = part
                _print_text_part(config, chosen)
            dequantizing = dequantizing_arguments(config, part)
            model, report = chosen.from_pretrained(name_or_path, **(dequantizing | kwargs), output_loading_info=True)
            if dequantizing:  # otherwise the model would be quantized again when it is saved
                model._weight_conversions = None
                set_conversions(model)
            model.config.architectures = [type(model).__name__]
        except (*UNREADABLE, SafetensorError) as error:
            raise LoadError(f"{name_or_path} cannot be loaded: {error}") from error
        absent = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
        lacking = missing.without_new_head(model, absent, declared, name_or_path)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        loaded = model.state_dict().keys() - {*absent, *lacking, *tied}
        missing.check_complete(name_or_path, lacking, bool(loaded), ignore_mismatched)
    return model


def _print_text_part(config: "PreTrainedConfig", chosen: type) -> None:
    distributed.print_main(
        f"load: {chosen.__name__} is the text part of {config.name_or_path}; the other parts are not loaded, and the export "
        f"will be a text-only model"
    )


def _load_on_meta(
    name_or_path: str,
    source: Source,
    verify: Verify,
    ignore_mismatched: bool,
    auto_class: model_class.AutoClass,
    kwargs: dict[str, Any],
) -> "PreTrainedModel":
    from transformers import GenerationConfig

    kwargs = {"trust_remote_code": False} | kwargs
    with distributed.sync_errors():
        kernels = take_arguments(kwargs)
    dtype = kwargs.pop("dtype", "auto")
    quantization = kwargs.pop("quantization_config", None)
    is_quantizing = quantization is not None and not getattr(quantization, "dequantize", False)
    index: SafetensorsIndex | None = None
    check_together(Path(name_or_path, kwargs.get("subfolder") or ""), is_read_by_all=source != "rank0")

    def describe() -> "Description":
        nonlocal index
        directory = resolve_directory(name_or_path, kwargs)
        refuse_adapter(name_or_path, directory)
        config, stored_as = _read_config(name_or_path, directory, kwargs, is_quantizing)
        generation_config = None
        if (directory / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(directory)
        index = open_index(directory)
        # Custom code exists only on ranks that have imported it, so objects of its classes cannot be broadcast.
        is_custom = kwargs["trust_remote_code"] and hasattr(config, "auto_map")
        return None if is_custom else config, stored_as, generation_config, index.tensors, torch.get_rng_state()

    # Rank 0 may have to download the model.
    config, stored_as, generation_config, stored, random_state = distributed.run_on_main(
        describe, distributed.patient_group()
    )
    if config is None:
        config = distributed.main_first(lambda: _read_custom_config(name_or_path, auto_class, kwargs))
    is_direct = source == "direct" or distributed.world_size() == 1 or (source == "auto" and _do_all_ranks_see(stored))
    directory = distributed.main_first(lambda: resolve_directory(name_or_path, kwargs)) if source == "direct" else None
    with distributed.sync_errors():
        if stored_as is not None and dtype == "auto":
            dtype = getattr(config, "dtype", None) or torch.bfloat16
        dtype = resolve_dtype(dtype, config, stored)
        if is_direct and index is None:
            index = SafetensorsIndex(stored.values()) if directory is None else open_index(directory)
            _check_copy(name_or_path, index.tensors, stored)
        stored = describe_dequantized(stored, stored_as, dtype)
        if index is not None:
            index.tensors = describe_dequantized(index.tensors, stored_as, dtype)
        declared = model_class.declared_class(config)
        with kernels.building(config, auto_class, kwargs["trust_remote_code"]):
            model = build_on_meta(config, dtype, kwargs["trust_remote_code"], auto_class)
        if type(model.config) is not type(config):
            _print_text_part(config, type(model))
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        quantizer = None
        if is_quantizing:  # transposes the weights of Conv1D layers
            quantizer = bnb_4bit.replace_linears(model, quantization, dtype)
        if generation_config is not None:
            model.generation_config = generation_config
        ranges = _map_ranges(model, shapes, stored, name_or_path, ignore_mismatched)
        found = CheckpointSource(name_or_path, index, stored, ranges, is_direct, verify, random_state)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random_state)  # every rank that reads creates the same new values
            missing.complete_ranges(model, found, ignore_mismatched=ignore_mismatched, declared=declared)
        if quantizer is not None:
            found.quantized = bnb_4bit.pack_weights(model, quantizer, dtype)
    MetaModelLoader(model, found, kernels).attach()
    return model


def _read_custom_config(
    name_or_path: str, auto_class: model_class.AutoClass, kwargs: dict[str, Any]
) -> "PreTrainedConfig":
    """Read the config of a model with custom code, and import that code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config, _ = _read_config(name_or_path, resolve_directory(name_or_path, kwargs), kwargs)
    chosen, _ = model_class.choose_class(config, auto_class, trust_remote_code=True)
    reference = config.auto_map.get(chosen.__name__)
    if reference is not None:
        get_class_from_dynamic_module(reference, name_or_path, revision=kwargs.get("revision"))
    return config


def _read_config(
    name_or_path: str, directory: Path, kwargs: dict[str, Any], is_quantizing: bool = False
) -> "tuple[PreTrainedConfig, QuantizationConfigMixin | None]":
    """Return a model's config, and the config with which its checkpoint is dequantized, or None if that is not quantized."""
    from transformers import AutoConfig, PreTrainedConfig

    rest = {key: value for key, value in kwargs.items() if key not in (*REFUSED_ARGUMENTS, "revision", "token")}
    config = copy.deepcopy(rest.pop("config", None))  # as from_pretrained does
    if config is None:
        rest.pop("subfolder", None)  # `directory` includes it
    try:
        if not isinstance(config, PreTrainedConfig):
            config, unused = AutoConfig.from_pretrained(config or directory, return_unused_kwargs=True, **rest)
            unknown = sorted(set(unused) - {"attn_implementation", "trust_remote_code", "use_cache"})
            if unknown:
                raise LoadError(
                    f"{', '.join(unknown)}: load_model has no such argument, and {type(config).__name__} no such field. Remove "
                    f"{'it' if len(unknown) == 1 else 'them'}."
                )
        quantization = take_quantization(config, name_or_path, is_quantizing)
    except (OSError, ValueError, TypeError) as error:
        raise LoadError(
            f"the config of {name_or_path} cannot be read: {summarize(error, 'sentence')}. Check its config.json, which "
            f"must have a model_type; a model with its own code needs trust_remote_code."
        ) from error
    if "attn_implementation" in rest:
        config._attn_implementation = rest["attn_implementation"]
    config.name_or_path = name_or_path
    check_has_layers(config)
    return config, quantization


def _do_all_ranks_see(stored: dict[str, StoredTensor]) -> bool:
    """Return whether every rank sees rank 0's files, with the same headers. Collective."""
    try:
        found = {tensor for file in {tensor.file for tensor in stored.values()} for tensor in read_header(file)}
        sees = found.issuperset(stored.values())
    except (OSError, LoadError):
        sees = False
    blind = [rank for rank, sees_files in enumerate(distributed.gather_objects(sees)) if not sees_files]
    decision = (
        f"ranks {blind[:3]} cannot see rank 0's files, so rank 0 reads for all"
        if blind
        else "every rank reads its shards"
    )
    distributed.print_main(f"load: {decision}")
    return not blind


def _check_copy(name_or_path: str, own: dict[str, StoredTensor], of_rank_0: dict[str, StoredTensor]) -> None:
    """Raise a LoadError if this rank's copy of a checkpoint has other tensors than rank 0's copy. Compares no values."""
    own_headers, headers = (
        {name: f"{tensor.dtype} of shape {list(tensor.shape)}" for name, tensor in tensors.items()}
        for tensors in (own, of_rank_0)
    )
    different = [name for name in headers | own_headers if own_headers.get(name) != headers.get(name)]
    if different:
        name = different[0]
        raise LoadError(
            f"the copy of {name_or_path} that rank {distributed.rank()} reads differs from rank 0's copy: {name} is "
            f"{own_headers.get(name, 'missing')}, not {headers.get(name, 'missing')}. Copy the model again, or use "
            f'source="rank0" (in a recipe, load_source: rank0).'
        )


def _map_ranges(
    model: "PreTrainedModel",
    shapes: dict[str, tuple[int, ...]],
    stored: dict[str, StoredTensor],
    name_or_path: str,
    ignore_mismatched: bool,
) -> dict[str, list[TensorRange]]:
    ranges, unexpected = map_checkpoint(model, shapes, stored, name_or_path, ignore_mismatched)
    unused = [name for name in unexpected if "rotary_emb.inv_freq" not in name and "position_ids" not in name]
    if unused:
        distributed.warn_main(
            f"{name_or_path}: {len(unused)} tensors match no parameter and are not loaded: {unused[:3]}"
        )
    return ranges
