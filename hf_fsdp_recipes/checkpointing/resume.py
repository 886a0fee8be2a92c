"""Finds the latest checkpoint that is intact and safe to read. Keeps the global batch if the number of ranks changes."""

import io
import logging
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.directory import list_checkpoints, read_manifest
from hf_fsdp_recipes.checkpointing.hashing import read_facts
from hf_fsdp_recipes.errors import CheckpointError, describe
from hf_fsdp_recipes.upstream.torch_internals import PICKLED_IN_METADATA, TensorStorageMetadata

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the latest checkpoint from which a run can safely resume, for `trainer.train(resume_from_checkpoint=...)`.

    All files of a checkpoint are read, and their hashes are compared with the manifest. The ranks divide the files among them.
    No file is read with unrestricted pickle. An incomplete, damaged or unsafe checkpoint is skipped with a warning. Checkpoints
    that Trainer wrote without FSDP have no hashes, so they are not checked.

    Collective if the process group exists, as it does once TrainingArguments are created. Otherwise each rank reads all files.

    Returns:
        The checkpoint's directory, or None if no checkpoint is usable. With None, training starts from step 0.
    """
    is_connected = distributed.is_distributed()
    rank, world_size = (distributed.rank(), distributed.world_size()) if is_connected else (0, 1)
    for checkpoint in distributed.from_main(
        list_checkpoints(Path(output_dir)) if rank == 0 else []
    ):
        damage = next(
            filter(None, distributed.gather(find_damage(checkpoint, rank, world_size))), None
        )
        if damage is None:
            return str(checkpoint)
        if rank == 0:
            logger.warning("%s is skipped: %s", checkpoint, damage)
    return None


def keep_global_batch(args: "TrainingArguments", checkpoint: str | os.PathLike[str] | None) -> None:
    """Set `gradient_accumulation_steps` so that each step trains on as many rows as in the checkpoint's run.

    Call this on every rank before the Trainer is created. Without a checkpoint, nothing changes.

    Raises:
        CheckpointError: no number of accumulation steps gives the same global batch.
    """
    wanted = (
        None
        if checkpoint is None
        else (read_manifest(Path(checkpoint)) or {}).get("global_batch_size")
    )
    if wanted is None:
        return
    rows_per_pass = args.train_batch_size * args.world_size
    steps, remainder = divmod(wanted, rows_per_pass)
    if remainder:
        raise CheckpointError(
            f"{checkpoint} was saved with a global batch of {wanted} rows, which {args.world_size} ranks with "
            f"{args.train_batch_size} rows each cannot train. Set per_device_train_batch_size to a divisor of "
            f"{wanted / args.world_size:g}, or change the number of ranks."
        )
    args.gradient_accumulation_steps = steps


def find_damage(
    checkpoint: Path, part: int = 0, num_parts: int = 1, prefix: str = ""
) -> str | None:
    """Check one part of the files whose names begin with `prefix`. Return what is wrong with them, or None if they are intact."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        has_weights = any(checkpoint.glob("*.safetensors")) and not any(
            checkpoint.rglob("*.distcp")
        )
        if has_weights and (checkpoint / "trainer_state.json").is_file():
            return None  # Trainer wrote this checkpoint without FSDP
        return "it has no readable manifest.json, so ShardedCheckpointCallback did not complete it"
    listed = [item for item in manifest["files"].items() if item[0].startswith(prefix)]
    by_size = sorted(listed, key=lambda item: (item[1]["bytes"], item[0]))
    for name, facts in by_size[part::num_parts]:
        try:
            if read_facts(checkpoint / name) != facts:
                return f"{name} is damaged"
        except (OSError, ValueError) as error:
            return f"{name} is unusable: {describe(error)}"
    # Also check `.metadata` files that the manifest does not list, because torch DCP would read them.
    folders = sorted({path.parent for path in checkpoint.glob(f"{prefix}*/*.metadata")})
    for folder in folders[part::num_parts]:
        try:
            check_pickles(folder)
        except Exception as error:  # a forged pickle can raise any error
            return f"{folder.name}/.metadata is unusable: {describe(error)}"
    return None


def check_pickles(directory: Path) -> None:
    """Raise an UnpicklingError if torch DCP would run code from a file when it loads this directory.

    DCP unpickles two things without restrictions: `.metadata`, and all entries that are not tensors, such as the learning rate.
    Tensors and Trainer's own files are read with `weights_only=True`.
    """
    for path in {
        directory / ".metadata",
        *directory.glob("*.metadata"),
    }:  # DCP also reads `__<rank>.metadata`
        with path.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
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


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in PICKLED_IN_METADATA.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which torch does not write there"
        )
