"""The directory of an export. It has a temporary name until all files are written. Then it gets the first free name."""

import copy
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit
from transformers import PreTrainedModel

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.directory import sync
from hf_fsdp_recipes.upstream.transformers_internals import custom_object_save


def create(output_dir: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary directory. Rename the directory to the first free name, and return its path. Collective.

    If `write` fails, its error is raised and the temporary directory is deleted.
    """
    temporary = output_dir.with_name(f".{output_dir.name}-tmp")
    try:
        distributed.run_on_main(lambda: _start(temporary))
        write(temporary)
        return distributed.run_on_main(lambda: _finish(temporary, output_dir))
    except BaseException:
        if distributed.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _start(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)  # left by an export that was killed
    temporary.mkdir(parents=True)


def _finish(temporary: Path, output_dir: Path) -> Path:
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    numbered = (
        output_dir.with_name(f"{output_dir.name}-{number}") for number in itertools.count(1)
    )
    final = next(
        path for path in itertools.chain([output_dir], numbered) if not os.path.lexists(path)
    )
    temporary.rename(final)
    sync(final.parent)
    return final


def write_configs(
    directory: Path, model: PreTrainedModel, dtype: torch.dtype | None = None
) -> None:
    """Write the configs that `save_pretrained` writes next to the weights. Rank 0 only.

    `dtype` is the dtype of the weight files. If it is None, the config's `dtype` stays as it is.
    """
    config = copy.deepcopy(model.config)
    config.dtype = config.dtype if dtype is None else str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def write_index(directory: Path, model: PreTrainedModel, split: StateDictSplit) -> None:
    """Write the index, which names the file of each tensor. Rank 0 only."""
    metadata = {"total_parameters": model.num_parameters(), **split.metadata}
    index = json.dumps(
        {"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True
    )
    (directory / "model.safetensors.index.json").write_text(index + "\n")


def write_description(directory: Path, model: torch.nn.Module, processor: Any) -> None:
    """Write the config and the tokenizer, which `export_checkpoint` needs in addition to the weights. Rank 0 only."""
    if hasattr(model, "peft_config"):
        model.peft_config[model.active_adapter].save_pretrained(os.fspath(directory))
    elif isinstance(model, PreTrainedModel):
        write_configs(directory, model)
    if processor is not None:
        processor.save_pretrained(directory)
