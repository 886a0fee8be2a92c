"""The `hf-fsdp rehearse` command. Does not import torch, so that `hf-fsdp --help` responds immediately."""

from pathlib import Path
from typing import Annotated

import typer

from hf_fsdp_recipes.errors import RecipeError


def rehearse(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A recipe: a name or a file. Any of its fields can follow.")],
    template: Annotated[str, typer.Option(help="A shipped template, or an Accelerate config file.")],
    keep: Annotated[bool, typer.Option("--keep", help="Keep the rehearsal's directory.")] = False,
) -> None:
    """Run a recipe with a tiny model on CPU ranks: load, kill, resume, stop, export, reload, generate."""
    from hf_fsdp_recipes.tools.rehearsal import steps  # loads torch

    if not steps.rehearse(recipe, template, context.args, keep):
        raise RecipeError(f"{recipe} failed its rehearsal; see the step marked FAILED.")
