"""Loads an export as its user will, in one process: a model, or an adapter on its base."""

from pathlib import Path
from typing import Any

ADAPTER_CONFIG = "adapter_config.json"


def load_export(directory: Path, **from_pretrained_kwargs: Any) -> Any:
    """Return the model of an export, in evaluation mode. One process; no collective.

    Adapters go through PEFT's own class, which gives their base the rows of added tokens; transformers 5.23 alone does
    not, and leaves DoRA's magnitudes at the base's norms without a word.

    Args:
        directory: what `export_model` or `export_checkpoint` wrote.
        **from_pretrained_kwargs: as in `from_pretrained`.

    Raises:
        OSError, ValueError: as `from_pretrained`.
    """
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    is_adapter = (directory / ADAPTER_CONFIG).is_file()
    loader: Any = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    return loader.from_pretrained(str(directory), **from_pretrained_kwargs).eval()
