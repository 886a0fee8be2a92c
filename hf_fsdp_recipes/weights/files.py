"""Finds and opens the safetensors files of a model, as `from_pretrained` does."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import PreTrainedConfig

from hf_fsdp_recipes.errors import LoadError, explained
from hf_fsdp_recipes.upstream.transformers_internals import (
    resolve_weights,
    str_to_torch_dtype,
)

# Everything of a model but its weights.
HUB_PATTERNS = [
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.py",
]
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")

# {dtype: its name in safetensors files}
DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
DTYPE_NAMES[torch.complex64] = "C64"


def find_model(
    name_or_path: str,
    arguments: dict[str, Any],
    has_weights: bool = True,
) -> tuple[Path, list[Path]]:
    """Return a model's local directory and its weight files. What is on the Hub is downloaded.

    These are the files that `from_pretrained` reads, and no others; none unless `has_weights`. The
    arguments that say where they are, as those of `from_pretrained`, are removed from `arguments`.
    """
    where = {name: arguments.pop(name) for name in HUB_ARGUMENTS if name in arguments}
    subfolder = arguments.pop("subfolder", "")
    variant = arguments.pop("variant", None)
    is_safe = arguments.pop("use_safetensors", True)
    directory = Path(name_or_path)
    if not directory.is_dir():
        problem = f"{name_or_path} is no directory and cannot be downloaded from the Hub"
        with explained(LoadError, problem):
            directory = Path(snapshot_download(name_or_path, allow_patterns=HUB_PATTERNS, **where))
        where["revision"] = directory.name  # so that the weights are those of the same commit
    directory /= subfolder
    if not has_weights:
        return directory, []
    file_in_config = None
    with suppress(OSError):
        settings, _ = PreTrainedConfig.get_config_dict(directory)
        file_in_config = settings.get("transformers_weights")
    problem = f"{name_or_path} has no usable safetensors files (convert its weights to safetensors)"
    with explained(LoadError, problem):
        if not is_safe:
            raise ValueError("use_safetensors is False")
        found: Any = resolve_weights(
            name_or_path,
            variant=variant,
            gguf_file=None,
            use_safetensors=True,
            user_agent=None,
            is_remote_code=True,  # otherwise the Hub may be asked to convert other files
            transformers_explicit_filename=file_in_config,
            download_kwargs=where | {"subfolder": subfolder},  # type: ignore[arg-type]
        )
    return directory, [Path(file) for file in found[0]]


def open_files(paths: Sequence[Path]) -> dict[str, safe_open]:
    """Return {tensor name: open file}, in the order in which the tensors are stored."""
    file_of = {}
    for path in paths:
        # The error itself does not name the file.
        with explained(LoadError, f"{path} cannot be read (download or save it again)"):
            file = safe_open(path, "pt")
        file_of.update(dict.fromkeys(file.offset_keys(), file))
    return file_of
