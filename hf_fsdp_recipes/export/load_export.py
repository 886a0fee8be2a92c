"""Loads an export in one process: a model, or an adapter on its base model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes.errors import ExportError, summarize
from hf_fsdp_recipes.export.export_directory import check_files
from hf_fsdp_recipes.export.lora_merge import ADAPTER_CONFIG_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_export(directory: Path, **from_pretrained_kwargs: Any) -> "PreTrainedModel":
    """Return the model of an export, in evaluation mode.

    Adapters are loaded through PEFT's own class, which adds the embedding rows of new tokens to the base model. transformers
    5.23 alone does not, and silently leaves DoRA's magnitudes at the base model's norms.

    Args:
        directory: written by `export_model` or `export_checkpoint`.
        **from_pretrained_kwargs: as in `from_pretrained`; `trust_remote_code` is False unless given.

    Raises:
        ExportError: it cannot be loaded, or its files differ from those that its marker lists.
    """
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    check_files(directory)
    is_adapter = (directory / ADAPTER_CONFIG_FILE).is_file()
    loader: Any = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    kwargs = {"trust_remote_code": False} | from_pretrained_kwargs  # transformers would ask on stdin without it
    try:
        return loader.from_pretrained(str(directory), **kwargs).eval()
    except Exception as error:  # transformers, PEFT and safetensors raise many types
        raise ExportError(f"{directory} cannot be loaded: {summarize(error, 'line')}") from error
