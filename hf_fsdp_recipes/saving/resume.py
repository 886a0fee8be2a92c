"""Finds the latest checkpoint that is intact and safe to read.

Also keeps the global batch if the number of ranks changes.
"""

import io
import logging
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import ParallelismConfig, parse_flag_from_env
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError, describe
from hf_fsdp_recipes.saving.directory import (
    MANIFEST,
    STATE_KEY,
    list_checkpoints,
    read_manifest,
    step_of,
    write_manifest,
)
from hf_fsdp_recipes.saving.hashing import read_facts
from hf_fsdp_recipes.upstream.torch_internals import TensorStorageMetadata, load_metadata

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the latest checkpoint from which a run can safely resume.

    It is meant for `trainer.train(resume_from_checkpoint=...)`. All files of a checkpoint are read,
    and their hashes are compared with the manifest. The ranks divide the files among them. No file
    is read with unrestricted pickle. An incomplete, damaged or unsafe checkpoint is skipped with a
    warning. A checkpoint that Trainer wrote without ShardedCheckpointCallback and without FSDP has
    no hashes, so it is not checked.

    Collective if the process group exists, as it does once TrainingArguments are created.
    Otherwise each rank reads all files.

    Returns:
        The checkpoint's directory, or None if no checkpoint is usable. With None, training starts
        from step 0.
    """
    # A rank that cannot read the directory must not leave the others waiting.
    decides = distributed.is_main() or not distributed.is_distributed()
    checkpoints = list_checkpoints(Path(output_dir).expanduser()) if decides else []
    for checkpoint in distributed.from_main(checkpoints):
        damage = find_damage_together(checkpoint)
        if damage is None:
            if decides and not any(checkpoint.glob("optimizer*")):
                logger.warning("%s holds only the model: the optimizer starts anew", checkpoint)
            return str(checkpoint)
        if decides:
            logger.warning("%s is skipped: %s", checkpoint, damage)
    return None


def keep_global_batch(args: "TrainingArguments", checkpoint: str | os.PathLike[str] | None) -> None:
    """Let each step train on as many rows as in the checkpoint's run.

    This sets `gradient_accumulation_steps`. Call it on every rank before the Trainer is created.
    Without a checkpoint, nothing changes.

    Raises:
        CheckpointError: no number of accumulation steps gives the same global batch.
    """
    if checkpoint is None:
        return
    manifest = read_manifest(Path(checkpoint)) or {}
    wanted = manifest.get("global_batch_size")
    if wanted is None:
        return
    num_rows = args.train_batch_size
    if getattr(args, "auto_find_batch_size", False):  # Trainer goes on with what it had found
        state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
        num_rows = state.train_batch_size or num_rows
    parallelism = getattr(args, "parallelism_config", None)
    if parallelism is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        parallelism = ParallelismConfig()  # from the launcher's variables
    # Ranks of one group for tensor or context parallelism train on the same rows.
    group_size = 1 if parallelism is None else parallelism.non_data_parallel_size
    num_replicas = args.world_size // group_size
    steps, remainder = divmod(wanted, num_rows * num_replicas)
    if remainder:
        raise CheckpointError(
            f"{checkpoint} was saved with a global batch of {wanted} rows, which "
            f"{num_replicas} ranks with {num_rows} rows each cannot train. "
            f"Set per_device_train_batch_size to a divisor of {wanted / num_replicas:g}, "
            "or change the number of ranks."
        )
    args.gradient_accumulation_steps = steps


def find_damage_together(checkpoint: Path, only_model: bool = False) -> str | None:
    """Do what `find_damage` does, but divide the files among the ranks.

    Collective if the process group exists. Otherwise each rank reads all files.
    """
    num_parts = len(distributed.gather(None))
    damage = find_damage(checkpoint, distributed.rank() % num_parts, num_parts, only_model)
    return next(filter(None, distributed.gather(damage)), None)


def find_damage(
    checkpoint: Path,
    part: int = 0,
    num_parts: int = 1,
    only_model: bool = False,
) -> str | None:
    """Check one part of the files, with `only_model` none of the optimizer's.

    Return what is wrong with them, or None if they are intact.
    """
    way_back = f"hf-fsdp checkpoints {checkpoint.parent} --accept {checkpoint.name}"
    manifest = read_manifest(checkpoint)
    if manifest is None:
        try:
            state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        except Exception as error:  # a damaged file can raise any error
            return f"{TRAINER_STATE_NAME} is unusable: {describe(error)}"
        if (
            STATE_KEY not in state.stateful_callbacks
            and not (checkpoint / MANIFEST).exists()
            and any(checkpoint.glob("*.safetensors"))
        ):
            return None  # Trainer alone wrote this checkpoint, without FSDP
        return (
            "it has no readable manifest.json, so ShardedCheckpointCallback did not complete it. "
            f"If its files are all there: {way_back}"
        )
    files = manifest["files"]
    names = [name for name in files if not (only_model and name.startswith("optimizer"))]
    names.sort(key=lambda name: files[name]["bytes"])
    for name in names[part::num_parts]:
        path = checkpoint / name
        try:
            if not path.resolve().is_relative_to(checkpoint.resolve()) or not path.is_file():
                return f"{name} is no file of this checkpoint. If that is on purpose: {way_back}"
            if read_facts(path) != files[name]:
                return f"{name} is damaged. If it was changed on purpose: {way_back}"
        except (OSError, ValueError) as error:
            return f"{name} is unusable: {describe(error)}"
    # Also check `.metadata` files that the manifest does not list, because DCP would read them.
    folders = sorted({path.parent for path in checkpoint.glob("*/*.metadata")})
    for folder in folders[part::num_parts]:
        try:
            check_pickles(folder)
        except Exception as error:  # a forged pickle can raise any error
            return f"{folder.name}/.metadata is unusable: {describe(error)}"
    return None


def accept(checkpoint: Path) -> list[str]:
    """Write a new manifest for a checkpoint whose files were changed on purpose.

    Returns:
        The names of the files that are not as the callback has written them.

    Raises:
        CheckpointError: there is no such checkpoint, it is unfinished, or it holds a pipe or a
            device.
    """
    is_there = checkpoint in list_checkpoints(checkpoint.parent)
    if not is_there or not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise CheckpointError(
            f"{checkpoint} is no complete checkpoint. Without --accept, this command lists them."
        )
    manifest = read_manifest(checkpoint)
    if manifest is None:
        logger.warning(
            "the manifest of %s is lost, and with it the number of rows of a step. Check "
            "gradient_accumulation_steps if you resume with another number of ranks.",
            checkpoint,
        )
        manifest = {"step": step_of(checkpoint), "files": {}}
    files = {}
    for path in checkpoint.rglob("*"):
        name = str(path.relative_to(checkpoint))
        if path.is_dir() or name == MANIFEST:
            continue
        if not path.is_file():
            raise CheckpointError(f"{path} is no file. Remove it first.")
        files[name] = read_facts(path)
    before = manifest["files"]
    write_manifest(checkpoint, manifest, files)
    return [name for name in before | files if before.get(name) != files.get(name)]


def check_pickles(directory: Path) -> None:
    """Raise an UnpicklingError if torch DCP would run code from a file of this directory.

    DCP unpickles two things without restrictions when it loads a directory: `.metadata`, and all
    entries that are not tensors, such as the learning rate. Tensors and Trainer's own files are
    read with `weights_only=True`.
    """
    # DCP also reads `__<rank>.metadata`.
    for path in {directory / ".metadata", *directory.glob("*.metadata")}:
        if not path.is_file():  # a pipe would never end
            raise pickle.UnpicklingError(f"{path.name} is no file")
        with path.open("rb") as stream:
            metadata = load_metadata(stream)
        # A forged dict may have an `items` of its own, which hides its entries.
        for index, info in dict.items(metadata.storage_data):
            if type(metadata.state_dict_metadata[index.fqn]) is TensorStorageMetadata:
                continue
            if info.relative_path != Path(info.relative_path).name or info.transform_descriptors:
                raise pickle.UnpicklingError(
                    f"it refers to {info.relative_path}, which torch does not write there"
                )
            with (directory / info.relative_path).open("rb") as stream:
                stream.seek(info.offset)
                torch.load(io.BytesIO(stream.read(info.length)), weights_only=True)
