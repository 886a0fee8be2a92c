"""The directory of an export.

It has a temporary name until all files are written. Then it gets the first free name.
"""

import filecmp
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from huggingface_hub import StateDictSplit
from peft import PeftModel
from torch.nn import Module
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.files import PathLike
from hf_fsdp_recipes.saving.directory import LOCK, lock, set_aside, sync
from hf_fsdp_recipes.upstream.transformers_internals import custom_object_save

RUN_FILE = "run.json"  # says which run has made an export
TEMPORARY = "-tmp-"  # in the name of an export that is being written


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
    # Another export may be under way, so each has a name of its own.
    name = f".{wanted.name}{TEMPORARY}{secrets.token_hex(4)}"
    temporary = wanted.with_name(distributed.from_main(name))
    with ExitStack() as held:
        try:
            distributed.run_on_main(lambda: _start(temporary, wanted, held))
            write(temporary)
            return distributed.run_on_main(lambda: _finish(temporary, wanted, processor))
        except BaseException:
            if distributed.is_main():
                rmtree(temporary, ignore_errors=True)
            raise


def _start(temporary: Path, wanted: Path, held: ExitStack) -> None:
    """Create the directory and lock it. Delete those of exports that were killed."""
    for leftover in wanted.parent.glob(f".{wanted.name}{TEMPORARY}*"):
        stream = lock(leftover / LOCK, is_needed=False)
        if stream:
            rmtree(leftover, ignore_errors=True)
            stream.close()
    stream = lock(temporary / LOCK)
    if stream:
        held.enter_context(stream)


def _finish(temporary: Path, wanted: Path, processor: Any) -> Path:
    if processor is not None:
        processor.save_pretrained(temporary)
    (temporary / LOCK).unlink()
    for path in (temporary, *temporary.rglob("*")):
        sync(path)
    return _rename_to_free_name(temporary, wanted)


def _rename_to_free_name(directory: Path, wanted: Path) -> Path:
    final = wanted
    number = 0
    while is_taken(final):
        number += 1
        final = wanted.with_name(f"{wanted.name}-{number}")
    directory.rename(final)
    sync(final.parent)
    return final


def is_taken(path: Path) -> bool:
    """Return whether a directory cannot get this path: more than an empty directory is there."""
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)


def read_run(export_dir: Path) -> dict[str, Any]:
    """Return which run has made an export, and at which step. Empty: no run has made it."""
    with suppress(OSError, TypeError, ValueError):
        return dict(json.loads((export_dir / RUN_FILE).read_text()))
    return {}


def check_is_own(export_dir: Path, run_id: str) -> None:
    """Raise an ExportError if a directory is there that is no export of this run. Rank 0 only."""
    if is_taken(export_dir) and read_run(export_dir).get("run") != run_id:
        raise ExportError(
            f"{export_dir} exists and is no export of this run. Move it, or choose another "
            "directory for the export."
        )


def publish(written: Path, export_dir: Path, facts: Mapping[str, object]) -> Path:
    """Make an export the newest one of its run. Rank 0 only.

    An earlier export of the run is set aside, or kept if it has the same weights. If something else
    has appeared there during training, the export gets the next free name. `facts` are those that
    `read_run` returns.

    Returns:
        The export's path.
    """
    (written / RUN_FILE).write_text(json.dumps(facts, indent=1) + "\n")
    sync(written / RUN_FILE)
    sync(written)
    if read_run(export_dir).get("run") == facts["run"]:
        # Other files may differ: PEFT writes a set of names in any order.
        names = [path.relative_to(written) for path in written.rglob("*.safetensors")]
        if filecmp.cmpfiles(written, export_dir, names, shallow=False)[0] == names:
            rmtree(written)
            return export_dir
        set_aside(export_dir)
    return _rename_to_free_name(written, export_dir)


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
        save_as_it_came(model.generation_config, directory)


def save_as_it_came(config: GenerationConfig, directory: PathLike, **_: object) -> None:
    """Write a generation config, also one that its `save_pretrained` refuses."""
    config.to_json_file(Path(directory, GENERATION_CONFIG_NAME))


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
    if isinstance(model, PeftModel):
        model.active_peft_config.save_pretrained(str(directory))
    elif isinstance(model, PreTrainedModel):
        write_configs(directory, model)
    if processor is not None:
        processor.save_pretrained(directory)
