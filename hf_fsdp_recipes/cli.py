"""The `hf-fsdp` command: each subcommand a few lines that call a room."""

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.checkpointing import command as checkpoints_command
from hf_fsdp_recipes.configs import command as config_command
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.export import command as export_command
from hf_fsdp_recipes.metrics import command as report_command
from hf_fsdp_recipes.tools.preflight import preflight
from hf_fsdp_recipes.tools.rehearsal import command as rehearsal_command
from hf_fsdp_recipes.tools.sweep import command as sweep_command

app = typer.Typer(help="FSDP recipes for Accelerate, Trainer and TRL.", no_args_is_help=True, add_completion=False)
app.command("preflight")(preflight.command)
config_command.register(app)
report_command.register(app)
checkpoints_command.register(app)
export_command.register(app)
rehearsal_command.register(app)
sweep_command.register(app)


def main() -> None:
    """Run the command; errors of this package end it with one line on stderr and status 1."""
    try:
        app()
    except RecipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


@app.command("prepare-data", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare_data(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="The directory to write; a recipe takes it as dataset_name.")],
    config: Annotated[Optional[Path], typer.Option(help="The recipe; any of its fields can follow.")] = None,
) -> None:
    """Tokenize and pack a recipe's dataset once, on a CPU; any field of the recipe as --field value."""
    from hf_fsdp_recipes.training.data.cache import prepare_directory

    recipe = [] if config is None else ["--config", str(config)]
    for line in prepare_directory([*recipe, *context.args], output):
        print(line)


@app.command("plan")
def plan(
    model: Annotated[Optional[str], typer.Option(help="A config.json, a directory with one, or a Hub id.")] = None,
    template: Annotated[str, typer.Option(help="A shipped template, or an Accelerate config.")] = "fsdp2_full_shard",
    config: Annotated[Optional[Path], typer.Option(help="A recipe to take settings from.")] = None,
    gpus: Annotated[Optional[int], typer.Option(help="Ranks over all nodes; default: the template's.")] = None,
    gpus_per_node: Annotated[Optional[int], typer.Option(help="Ranks on a node.")] = None,
    gpu_memory: Annotated[Optional[str], typer.Option(help="Memory of one GPU.")] = None,
    host_memory: Annotated[Optional[str], typer.Option(help="Memory of one node.")] = None,
    interconnect: Annotated[Optional[str], typer.Option(help="Into one node: 200Gb/s, say.")] = None,
    intra_node: Annotated[Optional[str], typer.Option(help="Into one GPU from its node: 300GB/s, say.")] = None,
    gpu_tflops: Annotated[Optional[float], typer.Option(help="Dense bf16 peak of one GPU.")] = None,
    batch: Annotated[Optional[int], typer.Option(help="Rows a rank and micro-batch.")] = None,
    length: Annotated[Optional[int], typer.Option(help="Tokens a row.")] = None,
    accumulation: Annotated[Optional[int], typer.Option(help="Micro-batches a step.")] = None,
    sync_each_batch: Annotated[Optional[bool], typer.Option(help="Reduce gradients after each micro-batch.")] = None,
    lora: Annotated[Optional[int], typer.Option(help="Rank of a LoRA adapter.")] = None,
    lora_targets: Annotated[Optional[str], typer.Option(help="Modules it adapts, comma-separated.")] = None,
    quantized: Annotated[Optional[str], typer.Option(help="4bit base weights.")] = None,
    optimizer: Annotated[Optional[str], typer.Option(help="Trainer's optim.")] = None,
    dtype: Annotated[Optional[str], typer.Option(help="Of the parameters as loaded.")] = None,
    mixed_precision: Annotated[Optional[str], typer.Option(help="Of computing; default: the template's.")] = None,
    gradient_checkpointing: Annotated[Optional[bool], typer.Option(help="Recompute layers in backward.")] = None,
    attention: Annotated[Optional[str], typer.Option(help="sdpa, sdpa_padded, flash or eager.")] = None,
    fused_loss: Annotated[Optional[bool], typer.Option(help="Loss in tiles, as TRL's trainer computes it.")] = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Find the best template and batch for the machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print values for machines.")] = False,
) -> None:
    """Say what a run will need, from the model's config alone; status 1 if it does not fit."""
    from hf_fsdp_recipes.tools.planner import command

    given = {name: value for name, value in locals().items() if value is not None and name not in command.NOT_OPTIONS}
    text, fits = command.run(model, template, config, given, suggest, as_json)
    print(text)
    raise typer.Exit(1 if fits is False else 0)
