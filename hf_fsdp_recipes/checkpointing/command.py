"""The `hf-fsdp checkpoints` command."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.units import format_bytes


def list_command(
    directory: Annotated[Path, typer.Argument(help="Output directory of a run.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check the checksum of every file.")] = False,
) -> None:
    """List a run's checkpoints and whether each is complete; exit status 1 if none can be resumed from."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory. Pass the run's output_dir.")
    found = layout.list_checkpoints(directory, verify)
    print(format_table(found))
    if not any(checkpoint.is_complete for checkpoint in found):
        raise CheckpointError(f"{directory} holds no complete checkpoint.")


def format_table(checkpoints: Iterable[layout.Checkpoint]) -> str:
    """Return a table with one row per checkpoint: step, size, number of ranks, loss, and `complete` or what is wrong."""
    lines = [f"{'step':>8}  {'size':>10}  {'ranks':>5}  {'loss':>8}  state"]
    for checkpoint in checkpoints:
        manifest = layout.read_manifest(checkpoint.path)
        num_bytes = sum((checkpoint.path / name).stat().st_size for name in layout.files_in(checkpoint.path))
        loss = manifest.get("loss")
        lines.append(
            f"{checkpoint.step:>8}  {format_bytes(num_bytes):>10}  {manifest.get('world_size', '?')!s:>5}  "
            f"{format(loss, '.4f') if isinstance(loss, int | float) else '?':>8}  {checkpoint.fault or 'complete'}"
        )
    return "\n".join(lines)
