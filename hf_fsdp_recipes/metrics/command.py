"""`hf-fsdp report`: renders the report of a run."""

from pathlib import Path
from typing import Annotated

import typer

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE


def report(
    directory: Annotated[Path, typer.Argument(help="A run's output directory; the run may still be running.")],
) -> None:
    """Rewrite a run's report.md and plots from its metrics.jsonl."""
    if not (directory / METRICS_FILE).is_file():
        raise DataError(f"{directory} has no {METRICS_FILE}. Runs with `report: true` write one to their output_dir.")
    from hf_fsdp_recipes.metrics.report import write_report  # imports torch

    print(f"report: {write_report(directory)}")
