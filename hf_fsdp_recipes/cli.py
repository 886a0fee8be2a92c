"""The `hf-fsdp` command: each subcommand a few lines that call a room."""

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hf_fsdp_recipes.errors import CheckpointError, RecipeError, TemplateError
from hf_fsdp_recipes.tools.planner import command as plan_command
from hf_fsdp_recipes.tools.preflight import preflight

app = typer.Typer(help="FSDP recipes for Accelerate, Trainer and TRL.", no_args_is_help=True, add_completion=False)
config_app = typer.Typer(help="Accelerate FSDP configs: find, render, check.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.command("preflight")(preflight.command)
plan_command.register(app)


def main() -> None:
    """Run the command; errors of this package end it with one line on stderr and status 1."""
    try:
        app()
    except RecipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


@app.command("checkpoints")
def checkpoints(
    directory: Annotated[Path, typer.Argument(help="A run's output directory.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every checksum.")] = False,
) -> None:
    """List a run's checkpoints: step, complete or why not, size, ranks, loss; status 1 if none can be resumed."""
    from hf_fsdp_recipes.checkpointing import layout

    found = layout.list_checkpoints(directory, verify)
    print(layout.format_table(found))
    if not any(checkpoint.is_complete for checkpoint in found):
        raise CheckpointError(f"{directory} holds no complete checkpoint.")


@app.command("export")
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A sharded checkpoint: checkpoint-<step>, or a folder of .distcp files.")
    ],
    output: Annotated[Path, typer.Argument(help="The directory to write.")],
    base_model: Annotated[
        Optional[str], typer.Option(help="Directory or Hub id of the model, if it is not recorded.")
    ] = None,
    dtype: Annotated[Optional[str], typer.Option(help="Dtype to cast to, bfloat16 say.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file.")] = "5GB",
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="LoRA: write base and adapter as one model.")
    ] = False,
) -> None:
    """Write a sharded checkpoint as a model directory; no GPU, constant memory."""
    from hf_fsdp_recipes import export_checkpoint

    export_checkpoint(
        checkpoint,
        output,
        base_model=base_model,
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge_adapter=merge_adapter,
    )
    print(f"exported: {output}")


@app.command("report")
def report(
    directory: Annotated[Path, typer.Argument(help="A run's output directory; the run may be under way.")],
) -> None:
    """Write a run's report.md and plots anew from its metrics.jsonl."""
    from hf_fsdp_recipes.metrics.report import render

    print(f"report: {render(directory)}")


@app.command("generate")
def generate(
    model: Annotated[Path, typer.Argument(help="An export: a model or an adapter.")],
    prompt_file: Annotated[Path, typer.Option(help="Text file with the prompt.")],
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: Annotated[Optional[str], typer.Option(help="System message, with --chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="How much to generate.")] = 200,
) -> None:
    """Generate from an export, greedily: the check that the weights are what they should be."""
    from hf_fsdp_recipes.export.generate import generate as run

    print(run(model, prompt_file, chat, system, max_new_tokens))


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


@app.command("sweep", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def sweep(
    context: typer.Context,
    recipe: Annotated[Optional[Path], typer.Argument(help="The recipe; any of its fields can follow.")] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks over all nodes: 1,2,4.")] = "1,2",
    templates: Annotated[str, typer.Option(help="Shipped templates, comma-separated.")] = "fsdp2_full_shard",
    output: Annotated[Optional[Path], typer.Option(help="The sweep's directory; default: runs/sweep_RECIPE.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a case; the first 3 are warm-up.")] = 13,
    script: Annotated[Path, typer.Option(help="What accelerate launch starts.")] = Path("recipes/sft.py"),
    time_limit_minutes: Annotated[float, typer.Option(help="After which a case is ended and has failed.")] = 60,
    gpus_per_node: Annotated[int, typer.Option(help="Of a full node, with --submit.")] = 8,
    submit: Annotated[bool, typer.Option("--submit", help="Write Slurm jobs into submit.sh; run nothing.")] = False,
    collect: Annotated[Optional[Path], typer.Option(help="Make table and plots of this sweep's runs.")] = None,
) -> None:
    """Run a recipe over numbers of ranks and templates; write one table and plots, out of memory included."""
    from hf_fsdp_recipes.tools.sweep import sweep as sweeping

    limits = (script, time_limit_minutes, gpus_per_node)
    print(sweeping.command(recipe, ranks, templates, output, steps, context.args, *limits, submit, collect))


@app.command("rehearse", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def rehearse(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A recipe's YAML; any --field value after it overrides it.")],
    template: Annotated[str, typer.Option(help="A template's name, or an Accelerate config.")],
    keep: Annotated[bool, typer.Option("--keep", help="Leave the rehearsal's directory.")] = False,
) -> None:
    """Run the very recipe with its model shrunk on CPU ranks: load, kill, resume, stop, export, reload, generate."""
    from hf_fsdp_recipes.tools.rehearsal.rehearse import rehearse as run

    if not run(recipe, template, context.args, keep):
        raise RecipeError(f"{recipe} did not pass its rehearsal.")


@config_app.command("list")
def config_list() -> None:
    """List the templates, one line each."""
    from hf_fsdp_recipes.configs import templates

    for template in templates.all_templates():
        print(f"{template.name:<34} {templates.first_sentence(template)}")


@config_app.command("show")
def config_show(name: Annotated[str, typer.Argument(help="A template's name, as `config list` prints it.")]) -> None:
    """Print a template as it is shipped."""
    from hf_fsdp_recipes.configs import templates

    print(templates.render(templates.find_template(name)), end="")


@config_app.command("render")
def config_render(
    name: Annotated[str, typer.Argument(help="A template's name.")],
    num_machines: Annotated[Optional[int], typer.Option(help="Number of nodes.")] = None,
    num_processes: Annotated[Optional[int], typer.Option(help="Number of ranks over all nodes.")] = None,
    wrap_class: Annotated[Optional[str], typer.Option(help="Layer class to wrap; default: the model's own.")] = None,
    min_num_params: Annotated[Optional[int], typer.Option(help="Parameters a unit must exceed (size wrap).")] = None,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="File to write; default: stdout.")] = None,
) -> None:
    """Write a template for your own machine."""
    from dataclasses import replace

    from hf_fsdp_recipes.configs import templates

    wishes: dict[str, Any] = {
        "num_machines": num_machines,
        "num_processes": num_processes,
        "wrap_class": wrap_class,
        "min_num_params": min_num_params,
    }
    given = {key: value for key, value in wishes.items() if value is not None}
    text = templates.render(replace(templates.find_template(name), **given))
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")


@config_app.command("render-all", hidden=True)
def config_render_all() -> None:
    """Write the committed files of accelerate_configs/ anew from their source."""
    from hf_fsdp_recipes.configs import templates

    for template in templates.all_templates():
        (templates.template_directory() / f"{template.name}.yaml").write_text(
            templates.render(template), encoding="utf-8"
        )


@config_app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="An Accelerate config file.")],
    model: Annotated[
        Optional[str], typer.Option(help="Model to check wrap classes against: a directory or Hub id.")
    ] = None,
) -> None:
    """Report all faults of a config at once; status 1 if there are any."""
    from hf_fsdp_recipes.configs import validate as check

    config = check.read_config(file)
    faults = check.find_faults(config, check.module_classes(model) if model else None)
    if faults:
        raise TemplateError(f"{file} has {len(faults)} fault{'s'[: len(faults) != 1]}:\n  - " + "\n  - ".join(faults))
    print(f"{file}: no faults found")
