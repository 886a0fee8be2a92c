"""`hf-fsdp report`: renders the report of a run."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the `report` command to `hf-fsdp`."""
    app.command("report")(report)


def report(
    directory: Annotated[Path, typer.Argument(help="A run's output directory; the run may still be running.")],
) -> None:
    """Rewrite a run's report.md and plots from its metrics.jsonl."""
    from hf_fsdp_recipes.metrics.report import render  # imports torch

    print(f"report: {render(directory)}")
