"""Loads an export in one process: a model, or an adapter on its base model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes.errors import ExportError, LoadError, summarize
from hf_fsdp_recipes.export.adapter_files import ADAPTER_CONFIG_FILE, read_adapter, recorded_class
from hf_fsdp_recipes.loading.dequantize import dequantizing_arguments
from hf_fsdp_recipes.loading.export_marker import check_files
from hf_fsdp_recipes.model_class import choose_class

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def load_export(directory: Path, **from_pretrained_kwargs: Any) -> "PreTrainedModel":
    """Return the model of an export, in evaluation mode, on the CPU unless `device_map` says otherwise.

    Adapters are loaded through PEFT's own class, because loading with transformers 5.23 alone silently leaves DoRA's magnitudes at
    the base model's norms.
    Raises an ExportError if the export cannot be loaded, or its files have changed since it was written.
    """
    kwargs = {"trust_remote_code": False} | from_pretrained_kwargs  # otherwise transformers would ask on stdin
    is_adapter = (directory / ADAPTER_CONFIG_FILE).is_file()
    try:
        return (_load_with_adapter if is_adapter else _load_model)(str(directory), **kwargs).eval()
    except LoadError as error:
        raise ExportError(str(error)) from error
    except Exception as error:  # transformers, PEFT and safetensors raise many types
        raise ExportError(f"{directory} cannot be loaded: {summarize(error, 'line')}") from error


def _load_model(
    name: str, auto_class: str | None = None, fields: dict[str, int] | None = None, **kwargs: Any
) -> "PreTrainedModel":
    """Load a model with changed config fields, as `auto_class` or, if that is None, as the class that the config declares."""
    from transformers import AutoConfig

    code = {key: kwargs[key] for key in ("revision", "token", "trust_remote_code") if key in kwargs}
    check_files(Path(name))
    config = AutoConfig.from_pretrained(name, **code, **(fields or {}))
    chosen, part = choose_class(config, auto_class, kwargs["trust_remote_code"])
    return chosen.from_pretrained(name, config=part, **(dequantizing_arguments(config, part) | kwargs))


def _load_with_adapter(directory: str, **kwargs: Any) -> "PeftModel":
    """Load an adapter as PEFT's auto classes do, but to the CPU and with the base model class that the adapter records."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    check_files(Path(directory))
    config, tensors = read_adapter(Path(directory))
    auto_class, fields = recorded_class(config, tensors)
    base = _load_model(config.base_model_name_or_path, auto_class, fields, revision=config.revision, **kwargs)
    if (Path(directory) / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=kwargs["trust_remote_code"])
        if len(tokenizer) > base.get_input_embeddings().weight.shape[0]:
            base.resize_token_embeddings(len(tokenizer))  # the adapter has rows for new tokens
    placement = {name: kwargs[name] for name in ("device_map",) if name in kwargs}
    return PeftModel.from_pretrained(base, directory, torch_device="cpu", **placement)
