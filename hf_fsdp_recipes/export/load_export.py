"""Loads an export in one process: a model, or an adapter on its base model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes.errors import ExportError, summarize
from hf_fsdp_recipes.export.export_directory import check_files
from hf_fsdp_recipes.export.lora_merge import ADAPTER_CONFIG_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_export(directory: Path, **from_pretrained_kwargs: Any) -> "PreTrainedModel":
    """Return the model of an export, in evaluation mode, on the CPU unless `device_map` says otherwise.

    Adapters are loaded through PEFT's own class. transformers 5.23 alone does not, and silently leaves DoRA's magnitudes at the
    base model's norms.

    Args:
        directory: written by `export_model` or `export_checkpoint`.
        **from_pretrained_kwargs: as in `from_pretrained`; `trust_remote_code` is False unless given.

    Raises:
        ExportError: it cannot be loaded, or its files differ from those that its marker lists.
    """
    from transformers import AutoModelForCausalLM

    check_files(directory)
    kwargs = {"trust_remote_code": False} | from_pretrained_kwargs  # transformers would ask on stdin without it
    is_adapter = (directory / ADAPTER_CONFIG_FILE).is_file()
    load: Any = _load_with_adapter if is_adapter else AutoModelForCausalLM.from_pretrained
    try:
        return load(str(directory), **kwargs).eval()
    except Exception as error:  # transformers, PEFT and safetensors raise many types
        raise ExportError(f"{directory} cannot be loaded: {summarize(error, 'line')}") from error


def _load_with_adapter(directory: str, **kwargs: Any) -> Any:
    """Do what `AutoPeftModelForCausalLM` does, which reads the adapter onto the accelerator."""
    from peft import PeftConfig, PeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = PeftConfig.from_pretrained(directory)
    base: Any = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, revision=config.revision, **kwargs)
    if (Path(directory) / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=kwargs["trust_remote_code"])
        if len(tokenizer) > base.get_input_embeddings().weight.shape[0]:
            base.resize_token_embeddings(len(tokenizer))  # the adapter has rows for new tokens
    placement = {name: kwargs[name] for name in ("device_map",) if name in kwargs}
    return PeftModelForCausalLM.from_pretrained(base, directory, torch_device="cpu", **placement)
