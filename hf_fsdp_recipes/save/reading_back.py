"""Loads an export as its user will, in one process: a model, or an adapter on its base."""

import json
from pathlib import Path
from typing import Any

ADAPTER_CONFIG = "adapter_config.json"


def load_export(directory: Path, **from_pretrained_kwargs: Any) -> Any:
    """Return the model of an export, in evaluation mode. One process; no collective.

    Adapters of DoRA go through PEFT: transformers 5.23 leaves their magnitudes at the base's norms, without a word.

    Args:
        directory: what `export_model` or `export_checkpoint` wrote.
        **from_pretrained_kwargs: as in `from_pretrained`.

    Raises:
        OSError, ValueError: as `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    file = directory / ADAPTER_CONFIG
    config = json.loads(file.read_text()) if file.is_file() else {}
    if not config.get("use_dora"):
        return AutoModelForCausalLM.from_pretrained(directory, **from_pretrained_kwargs).eval()
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], **from_pretrained_kwargs)
    return PeftModel.from_pretrained(base, directory).eval()
