"""The directory of an export: a temporary one while it is written, then the first free name."""

import copy
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit
    from transformers import PreTrainedModel

SMALL_FILES_BYTES = 64 * 1024**2  # room for the tokenizer and the configs


def create(output_dir: Path, num_bytes: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary directory, and rename it to the first free name. Collective.

    If `write` fails or there are fewer than `num_bytes` free, raises an ExportError on every rank and leaves nothing behind.
    """
    temporary = output_dir.with_name(f".{output_dir.name}-tmp")
    try:
        distributed.run_on_main(lambda: _start(temporary, num_bytes))
        write(temporary)
        return distributed.run_on_main(lambda: _finish(temporary, output_dir))
    except BaseException:
        if distributed.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _start(temporary: Path, num_bytes: int) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(temporary.parent).free
    if num_bytes + SMALL_FILES_BYTES > free:
        raise ExportError(f"the export needs {num_bytes:,} bytes, but {temporary.parent} has only {free:,} free.")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    temporary.mkdir()


def _finish(temporary: Path, output_dir: Path) -> Path:
    for path in (*temporary.rglob("*"), temporary):
        _sync(path)
    numbered = (output_dir.with_name(f"{output_dir.name}-{number}") for number in itertools.count(1))
    final = next(path for path in itertools.chain([output_dir], numbered) if not os.path.lexists(path))
    temporary.rename(final)
    _sync(final.parent)
    return final


def find_writers(directory: Path) -> list[int]:
    """Return the ranks that see rank 0's directory: all of them, or those on rank 0's node if its disk is not shared.

    Collective.
    """
    # The name is random because NFS clients remember for some seconds that a name did not exist.
    marker = directory / distributed.from_main(f".marker-{uuid.uuid4().hex}")
    distributed.run_on_main(marker.touch)
    seen = distributed.gather(marker.exists())
    if distributed.is_main():
        marker.unlink()
    return [number for number, found in enumerate(seen) if found]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_configs(directory: Path, model: "PreTrainedModel", dtype: torch.dtype | None = None) -> None:
    """Write the configs that `save_pretrained` writes next to the weights. Rank 0 only.

    `dtype` is that of the files; None keeps the config's.
    """
    from transformers.dynamic_module_utils import custom_object_save

    config = copy.deepcopy(model.config)
    config.dtype = config.dtype if dtype is None else str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def write_index(directory: Path, model: "PreTrainedModel", split: "StateDictSplit") -> None:
    """Write the index of several files. Rank 0 only."""
    metadata = {"total_parameters": model.num_parameters(), **split.metadata}
    index = json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
    (directory / "model.safetensors.index.json").write_text(index + "\n")


def write_description(directory: Path, model: torch.nn.Module, processor: Any) -> None:
    """Write what `export_checkpoint` needs beside a checkpoint's weights: the config and the tokenizer. Rank 0 only."""
    from transformers import PreTrainedModel

    if hasattr(model, "peft_config"):
        model.peft_config[model.active_adapter].save_pretrained(os.fspath(directory))
    elif isinstance(model, PreTrainedModel):
        write_configs(directory, model)
    if processor is not None:
        processor.save_pretrained(directory)
