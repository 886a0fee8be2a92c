"""Chooses the checkpoint to resume from. The ranks share the work of verifying it."""

import functools
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.errors import CheckpointError, summarize

read_tensor_file = functools.partial(torch.load, map_location="cpu", weights_only=True)
verified: set[Path] = (
    set()
)  # resolved paths of checkpoints that this process has verified, or verifies while it downloads them


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a run, or None.

    Skips incomplete and altered checkpoints with a warning. Checks the file sizes of every checkpoint, and also
    the checksums of the one it returns; changes nothing on disk.

    Collective if there is a process group: every rank must call this, and each verifies its part of the files. Ranks wait for
    each other without a timeout.

    Raises:
        CheckpointError: on every rank, if another rank does not see the files that rank 0 sees, or a file system fails.
    """
    found = distributed.run_on_main(lambda: layout.list_checkpoints(output_dir), distributed.patient_group())
    for checkpoint in reversed(found):
        fault = checkpoint.fault or _verify(checkpoint.path)
        if fault is None:
            return checkpoint.path
        distributed.warn_main(f"skipping {checkpoint.path}: {fault}")
    return None


def check_named(directory: Path) -> None:
    """Check a checkpoint that the user named to resume from.

    A checkpoint without a manifest, such as a stock Trainer's, is accepted with a warning.

    Collective, like `latest_checkpoint`.

    Raises:
        CheckpointError: the checkpoint does not exist, or a file, which the message names, does not match the manifest.
    """

    def has_manifest() -> bool:
        if not directory.is_dir() or layout.is_incomplete_name(directory.name):
            raise CheckpointError(
                f"{directory} is not a complete checkpoint directory. Pass one, or use auto for the newest complete one."
            )
        return (directory / layout.MANIFEST).is_file()

    if not distributed.run_on_main(has_manifest):
        distributed.warn_main(f"{directory} has no {layout.MANIFEST}; resuming without integrity checks")
        return
    fault = _verify(directory)
    if fault is not None:
        raise CheckpointError(
            f"{directory} cannot be resumed from: {fault}. Use an earlier checkpoint; resume_from_checkpoint auto finds it."
        )


def check_once(directory: Path) -> None:
    """Check a checkpoint, unless the processes of all ranks have already verified it. Collective, like `check_named`."""
    if not all(distributed.gather_objects(directory.resolve() in verified)):
        check_named(directory)


def _verify(directory: Path) -> str | None:
    """Return why a run cannot resume from a checkpoint, or None if it can. Each rank reads some of the files. Collective."""
    part, num_parts = (distributed.rank(), distributed.world_size()) if distributed.is_distributed() else (0, 1)
    with distributed.sync_errors(distributed.patient_group()):
        unseen = layout.validate(directory)
    try:
        fault = unseen or layout.validate(directory, verify=True, part=part, num_parts=num_parts)
    except OSError as error:
        fault = f"{error.filename or 'a file'} cannot be read: {error.strerror}"
    except CheckpointError as error:
        fault = str(error)
    found = distributed.gather_objects((unseen, fault), distributed.patient_group())
    for rank, (unseen, _) in enumerate(found):
        if unseen is not None and found[0][0] is None:
            raise CheckpointError(
                f"{directory} is complete on rank 0, but not on rank {rank}: {unseen}. Mount the same output_dir on "
                f"every node."
            )
    fault = next((fault for _, fault in found if fault is not None), None)
    if fault is None:
        verified.add(directory.resolve())
    return fault


def check_small_files(checkpoint: Path) -> None:
    """Read the small files that Trainer will load on this rank, so that damage is found early. Not a collective.

    Raises:
        CheckpointError: a file cannot be read, or contains objects other than plain data.
    """
    from transformers import PreTrainedConfig, TrainerState
    from transformers.trainer_pt_utils import safe_globals

    tensors = ("scheduler.pt", layout.SCALER_FILE, "rng_state.pth", f"rng_state_{distributed.rank()}.pth")
    readers: dict[str, Any] = dict.fromkeys(tensors, read_tensor_file)
    readers["optimizer.pt"] = functools.partial(read_tensor_file, mmap=True)  # does not read the tensors yet
    readers |= {file.name: functools.partial(safe_open, framework="pt") for file in checkpoint.glob("*.safetensors")}
    readers |= {"trainer_state.json": TrainerState.load_from_json, "config.json": PreTrainedConfig.from_json_file}
    for name, read in readers.items():
        try:
            if (checkpoint / name).exists():
                with safe_globals():
                    read(checkpoint / name)
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint / name} cannot be read: {summarize(error, 'line')}. Use another checkpoint."
            ) from error
