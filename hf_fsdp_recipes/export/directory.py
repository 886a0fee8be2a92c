"""The directory of an export.

It has a temporary name until all files are written. Then it gets the first free name.
"""

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from shutil import rmtree
from typing import Any, cast

import torch
from huggingface_hub import StateDictSplit
from peft import PeftModel
from torch.nn import Module
from transformers import PreTrainedModel

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.export.files import PathLike
from hf_fsdp_recipes.saving.directory import sync
from hf_fsdp_recipes.upstream.transformers_internals import custom_object_save


def create(
    output_dir: PathLike,
    write: Callable[[Path], None],
    processor: Any,
) -> Path:
    """Let `write` fill a temporary directory. Rename it to the first free name. Collective.

    Rank 0 adds the files of `processor`, a tokenizer or another object with `save_pretrained`, or
    None. If anything fails, the error is raised and the temporary directory is deleted.

    Returns:
        The path of the renamed directory.
    """
    wanted = Path(output_dir)
    temporary = wanted.with_name(f".{wanted.name}-tmp")
    try:
        distributed.run_on_main(lambda: _start(temporary))
        write(temporary)
        return distributed.run_on_main(lambda: _finish(temporary, wanted, processor))
    except BaseException:
        if distributed.is_main():
            rmtree(temporary, ignore_errors=True)
        raise


def _start(temporary: Path) -> None:
    rmtree(temporary, ignore_errors=True)  # left by an export that was killed
    temporary.mkdir(parents=True)


def _finish(temporary: Path, wanted: Path, processor: Any) -> Path:
    if processor is not None:
        processor.save_pretrained(temporary)
    for path in (temporary, *temporary.rglob("*")):
        sync(path)
    final = wanted
    number = 0
    while os.path.lexists(final):
        number += 1
        final = wanted.with_name(f"{wanted.name}-{number}")
    temporary.rename(final)
    sync(final.parent)
    return final


def write_configs(
    directory: Path,
    model: PreTrainedModel,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the configs that `save_pretrained` writes next to the weights. Rank 0 only.

    `dtype` is the dtype of the weight files. If it is None, the config's `dtype` stays as it is.
    """
    config = deepcopy(model.config)
    if dtype is not None:
        config.dtype = dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        # transformers itself passes a config; its annotation says dict.
        custom_object_save(model, directory, config=config)  # type: ignore[arg-type]
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def write_index(
    directory: Path,
    model: PreTrainedModel,
    split: StateDictSplit,
) -> None:
    """Write the index, which names the file of each tensor. Rank 0 only."""
    index = {
        "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
        "weight_map": split.tensor_to_filename,
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (directory / "model.safetensors.index.json").write_text(text + "\n")


def write_description(
    directory: Path,
    model: Module,
    processor: Any,
) -> None:
    """Write the config and the tokenizer. Rank 0 only.

    `export_checkpoint` needs them in addition to the weights.
    """
    if hasattr(model, "peft_config"):
        cast(PeftModel, model).active_peft_config.save_pretrained(str(directory))
    elif isinstance(model, PreTrainedModel):
        write_configs(directory, model)
    if processor is not None:
        processor.save_pretrained(directory)
