"""The small files next to a model's weights: config, generation config, and tokenizer with its chat template.

Every checkpoint includes them, like Trainer's checkpoints, because training may have added embeddings or changed the tokenizer.
"""

import contextlib
import copy
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes.peft_models import has_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer_config.json"
CONFIG_FILE = "config.json"
# Copied from the original model; a tokenizer or processor that is saved afterwards overwrites them.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def collect(model: torch.nn.Module, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, bytes]:
    """Map the names of the config and tokenizer files to their contents, without configs for an adapter. Rank 0 only."""
    from transformers import PreTrainedTokenizerBase

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        if not has_adapter(model):
            save_configs(model, directory)
        if tokenizer is not None:
            # A checkpoint has no folder for several chat templates, so they are saved in the tokenizer's config.
            has_several = isinstance(tokenizer, PreTrainedTokenizerBase) and isinstance(tokenizer.chat_template, dict)
            tokenizer.save_pretrained(directory, **({"save_jinja_files": False} if has_several else {}))
        return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def save_configs(model: torch.nn.Module, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write the configs for inference, and copy the processor's files and the model's own code. Rank 0 only."""
    from transformers import PreTrainedModel
    from transformers.dynamic_module_utils import custom_object_save

    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        return
    config = copy.deepcopy(inner.config)
    if dtype is not None:
        config.dtype = dtype
    config.architectures = [type(inner).__name__.removeprefix("FSDP")]
    config.use_cache = True  # training turns it off
    if (custom := find_custom_class(model)) is not None:
        custom_object_save(custom, directory)
    _copy_processor(inner.config, directory)
    config.save_pretrained(directory)
    if inner.can_generate():
        inner.generation_config.save_pretrained(directory)


def _copy_processor(config: "PreTrainedConfig", directory: Path) -> None:
    """Copy the files of a multimodal model's processor, which are not saved if training uses only the tokenizer."""
    from transformers.utils import cached_file

    if config.get_text_config() is config or not config.name_or_path:
        return
    for name in PROCESSOR_FILES:
        with contextlib.suppress(OSError):
            revision = getattr(config, "_commit_hash", None)
            shutil.copy(
                cached_file(config.name_or_path, name, revision=revision, local_files_only=True), directory / name
            )


def find_custom_class(model: torch.nn.Module) -> type | None:
    """Return the model's class if it comes from the checkpoint's own code (`trust_remote_code`), else None."""
    classes = (cls for module in model.modules() for cls in type(module).__mro__)
    return next((cls for cls in classes if cls.__module__.startswith("transformers_modules.")), None)


def find_directory(checkpoint: Path, file: str) -> Path | None:
    """Return the checkpoint directory or its parent, whichever contains `file`; None if neither does."""
    return next((folder for folder in (checkpoint, checkpoint.parent) if (folder / file).is_file()), None)
