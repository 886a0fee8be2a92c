"""Separates the files of runs that use the same output directory.

A run gets a random id when it first starts. Trainer's state and the manifests of checkpoints store the id, so a resumed run has
the id of the checkpoint that it continues from.
"""

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.layout import STATE_FILE, STATE_KEY
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.metrics.metrics_callback import MODEL_FILE
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE
from hf_fsdp_recipes.metrics.report import LOSS_PLOT, MEMORY_PLOT, REPORT_FILE, THROUGHPUT_PLOT

if TYPE_CHECKING:
    from transformers import TrainerState

PreviousRun = Literal["refuse", "archive"]

EXPORT, MERGED_EXPORT = EXPORTS = ("export", "export_merged")
_EXPORT = re.compile(rf"({'|'.join(EXPORTS)})(-\d+)?")  # with a number if `export` existed and could not be replaced
SIDE_FILES = (METRICS_FILE, REPORT_FILE, LOSS_PLOT, THROUGHPUT_PLOT, MEMORY_PLOT, MODEL_FILE)


def read_run(state: "TrainerState") -> str | None:
    """Return the id of the run that a Trainer's state belongs to, or None if the run started without this package."""
    return state.stateful_callbacks.get(STATE_KEY, {}).get("run")


def claim_directory(
    output_dir: str | os.PathLike[str],
    state: "TrainerState",
    previous_run: PreviousRun,
    run: str | None = None,
    *,
    is_starting: bool = True,
) -> None:
    """Make room for a run in its output directory, and give a new run its id.

    If another run has written there, `previous_run` decides: the new run is refused, or the earlier files are moved to
    `previous-<n>` when training starts. Checkpoints of later steps are then renamed, because the run will
    repeat these steps. Call this on rank 0 only, with the directory locked, before anything is written.

    Args:
        output_dir: the run's output directory.
        state: Trainer's state when training starts; a new run is at step 0.
        previous_run: what to do with another run's checkpoints and export.
        run: the run's id, if this process has already started the run before.
        is_starting: whether training starts now. If not, nothing is moved, because the run may still be refused for another
            reason.

    Raises:
        CheckpointError: the directory holds another run's checkpoints or export, and `previous_run` is "refuse".
    """
    directory = Path(output_dir)
    if state.global_step == 0:
        state.stateful_callbacks[STATE_KEY] = {"run": run or secrets.token_hex(8)}
    own = read_run(state)
    # A stock Trainer's checkpoint has no manifest. If its state file is missing too, the save was interrupted. Ignore
    # such a checkpoint, because it may be this run's.
    written = [
        one for one in layout.list_checkpoints(directory) if one.is_complete or (one.path / STATE_FILE).is_file()
    ]
    found = [checkpoint.path for checkpoint in written if checkpoint.run != own]
    is_resumed = layout.download_directory_for(directory, state.global_step).is_dir()
    is_own = len(found) < len(written) or run is not None or is_resumed
    if not is_own:  # no checkpoint here belongs to this run, so the export and metrics do not either
        found += [path for path in directory.glob("export*") if _EXPORT.fullmatch(path.name)]
        found += [directory / name for name in SIDE_FILES if found and (directory / name).is_file()]
    if found and previous_run == "refuse":
        raise CheckpointError(_describe(directory, found[0]))
    if not is_starting:
        return
    if found:
        _archive(directory, found)
    for checkpoint in layout.list_checkpoints(directory):
        if checkpoint.step > state.global_step:
            layout.set_aside(checkpoint.path)  # even if incomplete, because the run will repeat its step


def _describe(directory: Path, found: Path) -> str:
    named = "auto" if (found / layout.MANIFEST).is_file() else found
    is_checkpoint = layout.is_checkpoint_name(found.name)
    resume = f"Resume it with resume_from_checkpoint={named}, set" if is_checkpoint else "Set"
    return (
        f"{directory} holds {found.name} of another run. {resume} previous_run=archive to move it to "
        f"{_archive_for(directory)}, or choose another output_dir."
    )


def _archive_for(directory: Path) -> Path:
    number = 1
    while (target := directory / f"previous-{number}").exists():
        number += 1
    return target


def _archive(directory: Path, paths: list[Path]) -> None:
    target = _archive_for(directory)
    try:
        target.mkdir()
        for path in paths:
            path.rename(target / path.name)
    except OSError as error:
        raise CheckpointError(
            f"another run's files cannot be moved to {target}: {error.strerror}. Choose another output_dir."
        ) from error
    print(f"previous_run: moved {', '.join(sorted(path.name for path in paths))} to {target}", flush=True)
