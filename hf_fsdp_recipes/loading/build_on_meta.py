"""Builds a model from its config, with parameters on meta and real buffers."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import model_class
from hf_fsdp_recipes.errors import LoadError, summarize
from hf_fsdp_recipes.loading.dequantize import take_quantization
from hf_fsdp_recipes.loading.safetensors_index import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# These patterns skip weights that are not in safetensors format.
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]


def resolve_directory(name_or_path: str, kwargs: dict[str, Any]) -> Path:
    """Return a model's local directory. If `name_or_path` is a Hub id, download the model; raise a LoadError if that fails.

    `kwargs` are those of `from_pretrained`; the result includes their `subfolder`.
    """
    if Path(name_or_path).is_dir():
        return Path(name_or_path) / (kwargs.get("subfolder") or "")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = snapshot_download(
            name_or_path, allow_patterns=HUB_PATTERNS, revision=kwargs.get("revision"), token=kwargs.get("token")
        )
        return Path(directory) / (kwargs.get("subfolder") or "")
    except HFValidationError as error:
        raise LoadError(f"{name_or_path} is neither a directory nor a Hub id. Check the path.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise LoadError(
            f"{name_or_path} is not a local directory and cannot be downloaded from the Hub: {summarize(error, 'line')}. "
            f"Check the name, the network and, for a gated model, the token."
        ) from error


def read_config(name: str, overrides: str | None = None, is_4bit: bool = False) -> "PreTrainedConfig":
    """Read a config and override fields (`hidden_size=768,num_hidden_layers=12`); raise a LoadError if either fails.

    For a quantized checkpoint, return the config of the dequantized model. Raise a LoadError if `load_model` would refuse the
    checkpoint, or if `is_4bit` asks to quantize the weights of a quantized checkpoint again.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if overrides:
            config.update_from_string(overrides)
            config = type(config).from_dict(config.to_dict())  # validates the changed config
        check_has_layers(config)
        take_quantization(config, name, is_4bit)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        changed = f" with config_overrides {overrides}" if overrides else ""
        raise LoadError(
            f"the config of {name}{changed} cannot be used: {str(error).splitlines()[-1].strip().rstrip('.')}. Pass a directory "
            f"with a config.json or a Hub id{', or correct the overrides' if overrides else ''}."
        ) from error
    return config


def check_has_layers(config: "PreTrainedConfig") -> None:
    """Raise a LoadError for a model without layers."""
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(num_layers, int) and num_layers < 1:
        raise LoadError(f"num_hidden_layers is {num_layers}, so there is nothing to train. Set it to at least 1.")


def resolve_dtype(
    dtype: str | torch.dtype | None, config: "PreTrainedConfig", stored: dict[str, StoredTensor]
) -> torch.dtype:
    """Return the parameters' dtype as `from_pretrained` would choose it; raise a LoadError if `dtype` is not a dtype."""
    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise LoadError(f"dtype is {dtype!r}. Use auto, float32, bfloat16, float16 or a torch.dtype.")
        return found
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return torch.get_default_dtype()
    if isinstance(getattr(config, "dtype", None), torch.dtype):
        return config.dtype
    return next((tensor.dtype for tensor in stored.values() if tensor.dtype.is_floating_point), torch.float32)


def build_on_meta(
    config: "PreTrainedConfig",
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    auto_class: model_class.AutoClass = None,
) -> "PreTrainedModel":
    """Build the model of a config with meta parameters and real buffers, in evaluation mode.

    The class is `auto_class`, or else the class that the config declares; see `model_class.choose_class`.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = model_class.build(config, auto_class, dtype=dtype, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, RuntimeError) as error:
        raise LoadError(
            f"a {config.model_type!r} model cannot be built: {summarize(error)}. Check its config.json and the arguments."
        ) from error
    present = {type(module).__name__ for module in model.modules()}
    # Accelerate raises an error if `_no_split_modules` names a class that the model has no layer of.
    model._no_split_modules = present & set(model._no_split_modules or ())
    for module in model.modules():  # run the model's own init, but only on modules with buffers
        module._is_hf_initialized = next(module.buffers(recurse=False), None) is None
    model.initialize_weights()
    model.tie_weights()  # init_empty_weights unties parameters
    stored = model.state_dict().keys()
    for pattern, kept_dtype in model._get_dtype_plan(dtype).items():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in stored and re.search(pattern.replace("*", ".*"), name):  # as in transformers' core_model_loading
                tensor.data = tensor.data.to(kept_dtype)
    return model.eval()
