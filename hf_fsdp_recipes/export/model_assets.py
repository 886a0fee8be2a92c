"""What lies beside the weights of a model: config, generation config, tokenizer with its chat template.

They go into every checkpoint, as Trainer's own do, so that one can be exported without the run that wrote it: training
may have grown the embeddings or changed the tokenizer. Small files only; no weights.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

TOKENIZER_FILE = "tokenizer_config.json"
CONFIG_FILE = "config.json"


def collect(model: torch.nn.Module, tokenizer: Any) -> dict[str, bytes]:
    """Return the files by name. Main rank only.

    Args:
        model: wrapped or not; of one with adapters the config is the base model's business and is left out.
        tokenizer: or None.
    """
    from hf_fsdp_recipes.export import lora_merge

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        if not lora_merge.has_adapter(model):
            save_configs(model, directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def save_configs(model: torch.nn.Module, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write config and generation config, as they are for inference. Main rank only."""
    from transformers import PreTrainedModel

    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        return
    config = copy.deepcopy(inner.config)
    if dtype is not None:
        config.dtype = dtype
    config.architectures = [type(inner).__name__.removeprefix("FSDP")]
    config.use_cache = True  # training turns it off; inference wants it
    config.save_pretrained(directory)
    if inner.can_generate():
        inner.generation_config.save_pretrained(directory)


def find_directory(checkpoint: Path, file: str) -> Path | None:
    """Return where a checkpoint holds such a file: itself, or its parent if only the weights' folder was named."""
    return next((place for place in (checkpoint, checkpoint.parent) if (place / file).is_file()), None)
