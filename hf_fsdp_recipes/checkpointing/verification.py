"""Chooses the checkpoint to resume from. The ranks share the work of verifying it."""

import logging
import os
from pathlib import Path

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.errors import CheckpointError

logger = logging.getLogger(__name__)


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a run, or None.

    Skips incomplete and altered checkpoints with a warning. Checks the sizes of all files and the checksums of the
    checkpoint it returns; changes nothing on disk.

    Collective if there is a process group: every rank must call this, and each verifies its part of the files. Ranks wait for
    each other without a timeout.
    """
    found = distributed.run_on_main(lambda: layout.list_checkpoints(output_dir), distributed.patient_group())
    for checkpoint in reversed(found):
        fault = checkpoint.fault or _verify(checkpoint.path)
        if fault is None:
            return checkpoint.path
        if distributed.is_main():
            logger.warning("skipping %s: %s", checkpoint.path, fault)
    return None


def check_named(directory: Path) -> None:
    """Check a checkpoint that the user named to resume from.

    One without a manifest, such as a stock Trainer's, is accepted with a warning.

    Collective, as `latest_checkpoint`.

    Raises:
        CheckpointError: it does not exist or does not match its manifest; names the file.
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


def _verify(directory: Path) -> str | None:
    """Return why a checkpoint cannot be resumed from, after each rank has read its part of the files. Collective."""
    part, num_parts = (distributed.rank(), distributed.world_size()) if distributed.is_distributed() else (0, 1)
    try:
        fault = layout.validate(directory, verify=True, part=part, num_parts=num_parts)
    except OSError as error:
        fault = f"{error.filename or 'a file'} cannot be read: {error.strerror}"
    return next(filter(None, distributed.gather_objects(fault, distributed.patient_group())), None)
