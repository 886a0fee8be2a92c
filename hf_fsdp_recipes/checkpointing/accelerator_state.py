"""Saves an Accelerator's state as a checkpoint directory, for training loops without a Trainer."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.errors import CheckpointError, summarize
from hf_fsdp_recipes.patches.torch import deferred_save_errors

if TYPE_CHECKING:
    from accelerate import Accelerator


def save_checkpoint(
    accelerator: "Accelerator", output_dir: str | os.PathLike[str], step: int, *, keep: int | None = None
) -> Path:
    """Save an Accelerator's state to a checkpoint directory that appears only once all its files are complete.

    The files of `accelerator.save_state` and a manifest of their checksums are written to a hidden directory and flushed;
    then the directory is renamed to `checkpoint-<step>`. Training waits until this is done. Resume with
    `accelerator.load_state(latest_checkpoint(output_dir))`.

    Collective: every rank must call this, with the same arguments.

    Args:
        accelerator: an Accelerator that has prepared the model and the optimizer, and the scheduler if its state is to be saved.
        output_dir: a directory that all ranks can access and that no other run uses.
        step: number of steps done; the checkpoint is `<output_dir>/checkpoint-<step>`.
        keep: number of checkpoints to keep; older ones are deleted once this one is complete. None keeps all.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on every rank, if the directory cannot be created or completed, or another process changed it.
        RecipeError: on every rank, if a file cannot be written. After either error, the files of this save are deleted, and
            earlier checkpoints are intact.
    """
    final = layout.directory_for(output_dir, step)
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise CheckpointError(
            "automatic_checkpoint_naming is set, but save_checkpoint names checkpoints by step. Remove it from the "
            "Accelerator's ProjectConfiguration."
        )
    incomplete = distributed.run_on_main(lambda: layout.start(output_dir, step))
    try:
        files = _write(accelerator, incomplete, final)
        distributed.run_on_main(
            lambda: layout.commit(incomplete, final, files, {"step": step}), distributed.patient_group()
        )
    except BaseException:  # raised on every rank, so no rank is still writing
        if distributed.rank() == 0:
            shutil.rmtree(incomplete, ignore_errors=True)
        raise
    if keep is not None:
        distributed.run_on_main(lambda: layout.remove_old(output_dir, keep), distributed.patient_group())
    return final


def _write(accelerator: "Accelerator", incomplete: Path, final: Path) -> dict[str, layout.ManifestEntry]:
    """Write and flush the checkpoint's files. Return the manifest entries of all ranks' files. Collective."""
    from torch.distributed.checkpoint import CheckpointException

    group, plugin = distributed.patient_group(), getattr(accelerator.state, "fsdp_plugin", None)
    is_sharded = plugin is None or plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    with distributed.sync_errors(group):  # save_state writes each rank's random state last; one rank alone can fail
        try:
            # For other state dicts, Accelerate calls torch.save on single ranks, between collectives of all ranks.
            with contextlib.nullcontext() if is_sharded else deferred_save_errors():
                accelerator.save_state(str(incomplete))
        except CheckpointException as error:  # a BaseException, which sync_errors does not catch; every rank raises it
            cause = summarize(next(iter(error.failures.values()))[0], "line")
            raise CheckpointError(f"{final} could not be written: {cause}. Earlier checkpoints are intact.") from error
    names = distributed.run_on_main(lambda: layout.files_in(incomplete), group)
    with distributed.sync_errors(group):
        own = names[distributed.rank() :: distributed.world_size()]
        for name in own:
            layout.sync_path(incomplete / name)
        entries = layout.manifest_entries(incomplete, own)
    return {name: entry for of_rank in distributed.gather_objects(entries, group) for name, entry in of_rank.items()}
