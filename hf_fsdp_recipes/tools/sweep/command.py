"""The `hf-fsdp sweep` command. Does not import torch, so that `hf-fsdp --help` responds immediately."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.errors import PlanError


def sweep(
    context: typer.Context,
    recipe: Annotated[
        Optional[Path],
        typer.Argument(help="Recipe: a name or a file. Any field of the recipe can be overridden with --field value."),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Rank counts over all nodes, comma-separated.")] = "1,2",
    templates: Annotated[str, typer.Option(help="Shipped templates, comma-separated.")] = "fsdp2_full_shard",
    output: Annotated[Optional[Path], typer.Option(help="Output directory; default: runs/sweep_RECIPE.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps per case; the first 3 are warm-up.")] = 13,
    script: Annotated[Optional[Path], typer.Option(help="Script to launch; default: the shipped sft.py.")] = None,
    time_limit_minutes: Annotated[float, typer.Option(help="A case that takes longer is stopped and fails.")] = 60,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per node, with --submit.")] = 8,
    submit: Annotated[bool, typer.Option("--submit", help="Only write Slurm jobs, to submit.sh.")] = False,
    collect: Annotated[Optional[Path], typer.Option(help="Only write the table and plots of this sweep.")] = None,
) -> None:
    """Measure a recipe over rank counts and templates: memory, time and throughput, as a table and plots."""
    # Imported here because these load torch.
    from hf_fsdp_recipes.tools.subprocess_runner import SFT_SCRIPT
    from hf_fsdp_recipes.tools.sweep.cases import make_cases
    from hf_fsdp_recipes.tools.sweep.sweep import run_cases, write_jobs, write_summary

    if collect is None:
        if recipe is None:
            raise PlanError("No recipe given. Use `hf-fsdp sweep recipes/X.yaml --ranks 1,2,4`, or pass --collect DIR.")
        collect = output or Path("runs") / f"sweep_{recipe.stem}"
        names = [name.strip() for name in templates.split(",")]
        per_node = gpus_per_node if submit else None
        cases, skipped = make_cases(recipe, _parse_ranks(ranks), names, collect, steps, context.args, per_node)
        for reason in skipped:
            print(f"skipped: {reason}", flush=True)
        if submit:
            print(write_jobs(cases, collect))
            return
        run_cases(cases, script or SFT_SCRIPT, time_limit_minutes * 60)
    table = write_summary(collect)
    print(f"sweep: {table}\n")
    print("\n".join(line for line in table.read_text().splitlines() if line.startswith("|")))


def _parse_ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise PlanError(f"--ranks {text} is not a list of numbers. Separate them with commas: 1,2,4.") from error
