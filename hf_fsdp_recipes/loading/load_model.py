"""`load_model` returns a model whose weights are read when Accelerate shards the model."""

import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import PartialState, init_empty_weights
from accelerate.utils import parse_flag_from_env
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers.base import HfQuantizer

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError, explained
from hf_fsdp_recipes.loading.bnb_4bit import pack_weights
from hf_fsdp_recipes.loading.checkpoint import Checkpoint
from hf_fsdp_recipes.loading.loader import Loader
from hf_fsdp_recipes.loading.placeholder import insert_placeholders
from hf_fsdp_recipes.upstream import patches
from hf_fsdp_recipes.upstream.transformers_internals import (
    AutoHfQuantizer,
    AutoQuantizationConfig,
    get_builder,
    keep_present_units,
    no_init_weights,
    plan_dtypes,
    set_conversions,
)
from hf_fsdp_recipes.weights.files import find_model

# Arguments of `from_pretrained` that change nothing here.
WITHOUT_EFFECT = ("low_cpu_mem_usage", "weights_only")
FOR_BUILDING = ("attn_implementation", "experts_implementation", "trust_remote_code")

Arguments = dict[str, Any]  # keyword arguments of `from_pretrained`


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    source: Literal["rank0", "direct"] = "rank0",
    auto_class: Any = AutoModelForCausalLM,
    **kwargs: Any,
) -> PreTrainedModel:
    """Return a pretrained model whose weights take no memory until it is sharded.

    After that, each rank holds only its shard. The weights are read when Accelerate shards the
    model with FSDP2, in `trainer.train` or `accelerator.prepare`. Until then, you can add adapters
    to the model, but you can neither run nor save it. The loaded values equal those of
    `from_pretrained`. Without FSDP, this function only calls `from_pretrained`.

    Collective, with equal arguments on every rank. A rank needs memory only for its shard and for
    the weights in transfer.

    Args:
        name_or_path: a directory or a Hub id. Only rank 0 needs access to the directory, unless
            `source` is "direct" or `trust_remote_code` is set.
        source: with "rank0", only rank 0 reads weights. With "direct", every rank reads its own
            rows (dim 0) of each weight.
        auto_class: the class on which you would call `from_pretrained`.
        **kwargs: as in `from_pretrained`. `quantization_config` must be a 4-bit BitsAndBytesConfig.

    Raises:
        LoadError: on every rank. This call raises it for FSDP1, a missing model or a checkpoint
            that does not fit. Later, it is raised for an unreadable file, or a weight used or
            resized before loading (PiSSA, OLoRA, DoRA, new embeddings).
        PatchError: the installed version of Accelerate is not supported.
    """
    if not patches.is_fsdp_requested():
        return auto_class.from_pretrained(name_or_path, **kwargs)
    check_fsdp_version()
    patches.enable_cpu_ranks()
    patches.apply_for_loading()
    PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))  # starts the process group
    is_direct = source == "direct" or distributed.world_size() == 1  # one rank needs no sending
    return prepare_model(str(name_or_path), auto_class, is_direct, kwargs)


def prepare_model(
    name_or_path: str,
    auto_class: Any,
    is_direct: bool,
    kwargs: Arguments,
) -> PreTrainedModel:
    """Return a model of placeholders, with a loader of its weights. Collective."""
    kwargs = {
        name: value
        for name, value in kwargs.items()
        if value is not None and name not in WITHOUT_EFFECT
    }
    revision = kwargs.get("revision")
    dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))
    quantization_config = kwargs.pop("quantization_config", None)
    key_mapping = kwargs.pop("key_mapping", None)
    if kwargs.get("trust_remote_code"):
        # The classes in a model's own code cannot be sent.
        with distributed.agreed():
            found = describe_model(name_or_path, kwargs, distributed.is_main())
    else:
        found = distributed.run_on_main(lambda: describe_model(name_or_path, kwargs, True))
    files, config, building_arguments, generation_config = found
    files = distributed.from_main(files)
    checkpoint = Checkpoint(files, take_quantizer(config), key_mapping)
    if dtype == "auto":
        dtype = config.dtype or distributed.run_on_main(checkpoint.first_dtype)
    dtype = getattr(torch, str(dtype).removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"dtype={dtype!r} is not supported. Use 'auto' or one such as 'bfloat16'.")
    model = build_on_meta(config, dtype, auto_class, building_arguments)
    model.name_or_path = name_or_path
    model.config.name_or_path = name_or_path
    if generation_config:
        model.generation_config = generation_config
    planned = distributed.run_on_main(lambda: checkpoint.plan(model))
    checkpoint.entries, buffers, conversions = planned
    for name, value in buffers.items():
        model.get_buffer(name).copy_(value)
    set_conversions(model, conversions)
    if quantization_config:
        pack_weights(model, quantization_config, dtype, checkpoint)
    insert_placeholders(model, checkpoint)
    Loader(model, checkpoint, dtype, is_direct, revision).attach()
    return model


def check_fsdp_version() -> None:
    """Raise a LoadError if the launcher asks for FSDP1, which is Accelerate's default."""
    if os.getenv("FSDP_VERSION") != "2":
        raise LoadError(
            "the Accelerate config asks for FSDP1, Accelerate's default. Set fsdp_version: 2 in "
            "its fsdp_config, or convert the file with `accelerate to-fsdp2`."
        )


def describe_model(
    name_or_path: str,
    kwargs: Arguments,
    has_weights: bool,
) -> tuple[list[Path], PreTrainedConfig, Arguments, GenerationConfig | None]:
    """Return what the files of a model say about it, except for its weights.

    That is its weight files (if `has_weights`) and config, the arguments that are needed to build
    it, and its generation config.
    """
    if "code_revision" in kwargs:
        raise LoadError(
            "code_revision is not supported: the code is of the same revision as the weights. Use "
            "from_pretrained."
        )
    directory, files = find_model(name_or_path, kwargs, has_weights)
    if (directory / "adapter_config.json").is_file():
        raise LoadError(
            f"{name_or_path} holds an adapter, which load_model does not add. Load the base model "
            "from a directory of its own, and add the adapter with PeftModel.from_pretrained."
        )
    generation_config = None
    if (directory / "generation_config.json").is_file():
        generation_config = GenerationConfig.from_pretrained(directory)
    config = deepcopy(kwargs.pop("config", None))
    if not isinstance(config, PreTrainedConfig):  # otherwise, `kwargs` do not change it
        with explained(LoadError, f"the config of {name_or_path} cannot be used"):
            config, unused = AutoConfig.from_pretrained(
                config or directory, return_unused_kwargs=True, **kwargs
            )
        kwargs = {name: kwargs[name] for name in kwargs if name in unused or name in FOR_BUILDING}
    config.name_or_path = str(directory)  # where the model's own code is
    return files, config, kwargs, generation_config


def take_quantizer(config: PreTrainedConfig) -> HfQuantizer | None:
    """Remove the quantization from an FP8 or MXFP4 checkpoint's config.

    Return the quantizer that dequantizes the weights, or None if they are not quantized.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = settings.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise LoadError(
            f"the checkpoint is already quantized with {method}. Load the unquantized model."
        )
    del config.quantization_config
    dequantizing = AutoQuantizationConfig.from_dict(settings | {"dequantize": True})
    return AutoHfQuantizer.from_config(dequantizing, pre_quantized=True)


def find_class(architectures: list[str] | None) -> Any:
    """Return the model class that a config names, as TRL does, or else AutoModelForCausalLM."""
    return getattr(transformers, (architectures or [""])[0], AutoModelForCausalLM)


def build_on_meta(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    auto_class: Any,
    kwargs: Arguments,
) -> PreTrainedModel:
    """Return a model with meta parameters and real buffers, in evaluation mode."""
    build = getattr(auto_class, "from_config", None)
    if build is None:  # `auto_class` is one model's class, which takes no trust_remote_code
        build = get_builder(auto_class)
        kwargs.pop("trust_remote_code", None)
    with (
        explained(LoadError, "the model cannot be built with these arguments"),
        init_empty_weights(include_buffers=False),
        no_init_weights(),
    ):
        model = build(config, dtype=dtype, **kwargs)
    model.tie_weights()  # init_empty_weights unties the weights
    # Some model classes keep some weights in float32.
    for pattern, kept_dtype in plan_dtypes(model, dtype).items():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept_dtype)
    with explained(LoadError, f"Accelerate cannot shard {type(model).__name__} (use DDP)"):
        keep_present_units(model)
    return model.eval()
