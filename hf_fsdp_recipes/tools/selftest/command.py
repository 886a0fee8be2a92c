"""The `hf-fsdp selftest` command. Imports no torch, so that `hf-fsdp --help` answers at once."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.errors import RecipeError


def register(app: typer.Typer) -> None:
    """Add `selftest` to the command line."""
    app.command("selftest")(selftest)


def selftest(
    output: Annotated[Path, typer.Option(help="The report to write.")] = Path("selftest.md"),
    minutes: Annotated[float, typer.Option(min=0.1, help="Skip what would probably end later.")] = 5.0,
    script: Annotated[Optional[Path], typer.Option(help="recipes/sft.py, if not that of the checkout.")] = None,
) -> None:
    """Measure copies, saving and loading on this machine's devices, and check that a killed run resumes exactly."""
    from hf_fsdp_recipes.tools.selftest.selftest import run_selftest  # loads torch
    from hf_fsdp_recipes.tools.subprocess_runner import SFT_SCRIPT

    if not run_selftest(output, minutes, script or SFT_SCRIPT):
        raise RecipeError(f"the self-test failed. {output} lists the reasons; attach it to an issue.")
