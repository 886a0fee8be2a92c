"""Defines the `hf-fsdp` command. Each subpackage defines its own subcommands, which import torch only when they run."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.checkpointing import command as checkpoints_command
from hf_fsdp_recipes.configs import command as config_command
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.export import command as export_command
from hf_fsdp_recipes.metrics import command as report_command
from hf_fsdp_recipes.tools.launcher import command as launcher_command
from hf_fsdp_recipes.tools.planner import command as plan_command
from hf_fsdp_recipes.tools.preflight import command as preflight_command
from hf_fsdp_recipes.tools.rehearsal import command as rehearsal_command
from hf_fsdp_recipes.tools.selftest import command as selftest_command
from hf_fsdp_recipes.tools.sweep import command as sweep_command

# Any recipe field can be passed as --field value.
WITH_RECIPE_FIELDS = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="FSDP recipes for Accelerate, Trainer and TRL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a failed launch ends with torch's own table of the ranks' errors
)
launcher_command.register(app)
config_command.register(app)
app.command("plan")(plan_command.plan)
app.command("preflight")(preflight_command.preflight)
app.command("rehearse", context_settings=WITH_RECIPE_FIELDS)(rehearsal_command.rehearse)
app.command("selftest")(selftest_command.selftest)
app.command("sweep", context_settings=WITH_RECIPE_FIELDS)(sweep_command.sweep)
app.command("checkpoints")(checkpoints_command.list_command)
export_command.register(app)
app.command("report")(report_command.report)


def main() -> None:
    """Run the command. A RecipeError becomes one line on stderr and exit status 1."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # hides its warning about missing 4-bit kernels
    try:
        app()
    except RecipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


@app.command("prepare-data", context_settings=WITH_RECIPE_FIELDS)
def prepare_data(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="Directory to write; pass it to a recipe as dataset_name.")],
    config: Annotated[Optional[Path], typer.Option(help="Recipe to read the settings from: a name or a file.")] = None,
) -> None:
    """Tokenize and pack a recipe's dataset once, on a CPU. Override any field of the recipe with --field value."""
    from hf_fsdp_recipes.training.data.cache import prepare_directory

    recipe = [] if config is None else ["--config", str(config)]
    for line in prepare_directory([*recipe, *context.args], output):
        print(line)
