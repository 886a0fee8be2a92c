"""`hf-fsdp config`: lists, prints, renders and validates Accelerate FSDP configs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from hf_fsdp_recipes.configs import templates, validate
from hf_fsdp_recipes.configs.model_configs import describe_source
from hf_fsdp_recipes.configs.shipped_files import find_file, shipped_directory
from hf_fsdp_recipes.errors import TemplateError
from hf_fsdp_recipes.units import count

config_app = typer.Typer(help="List, render and check Accelerate FSDP configs.", no_args_is_help=True)
STRATEGY_HELP = f"One of {', '.join(templates.STRATEGIES)}."


def register(app: typer.Typer) -> None:
    """Add the `config` subcommands to `hf-fsdp`."""
    app.add_typer(config_app, name="config")


@config_app.command("list")
def list_templates() -> None:
    """List the shipped templates and when to use each."""
    for template in templates.shipped_templates():
        *others, last = [note[0] for note in template.notes[1:] or template.notes]
        also = "".join(f"{other.partition(':')[0]}. " for other in others if ":" in other)
        print(f"{template.name:<34} {also}{last}")


@config_app.command("path")
def print_path(
    name: Annotated[Optional[str], typer.Argument(help="Name of a shipped template; default: all of them.")] = None,
) -> None:
    """Print the path of a shipped template, or of the directory of all templates."""
    print(find_file("accelerate_configs", name) if name else shipped_directory("accelerate_configs"))


@config_app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of a template: one from `config list`, or a variant.")],
) -> None:
    """Print a template: a file in the current directory, a shipped file, or a variant that has no file."""
    try:
        text = find_file("accelerate_configs", name).read_text(encoding="utf-8")
    except TemplateError:
        text = templates.render(templates.find_template(name.removeprefix("accelerate_configs/").removesuffix(".yaml")))
    print(text, end="")


@config_app.command("render")
def render(
    name: Annotated[Optional[str], typer.Argument(help="Template to start from, instead of --strategy.")] = None,
    strategy: Annotated[Optional[templates.Strategy], typer.Option(help=STRATEGY_HELP)] = None,
    fsdp_version: Annotated[Optional[int], typer.Option(min=1, max=2, help="Default: 2, or 1 for no_shard.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep parameters and optimizer state on the CPU.")] = False,
    wrap: Annotated[
        Optional[Literal["layer", "size"]], typer.Option(help="Make FSDP units by layer or by size.")
    ] = None,
    min_num_params: Annotated[
        Optional[int], typer.Option(help="Wrap modules with more than this many parameters; implies --wrap size.")
    ] = None,
    wrap_class: Annotated[
        Optional[str], typer.Option(help="Layer classes to wrap, comma-separated; default: the model's own.")
    ] = None,
    num_machines: Annotated[Optional[int], typer.Option(help="Number of nodes.")] = None,
    num_processes: Annotated[Optional[int], typer.Option(help="Total number of ranks on all nodes.")] = None,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="File to write; default: stdout.")] = None,
) -> None:
    """Write a config for any combination of strategy, FSDP version, offload, wrapping, nodes and ranks.

    Pass either the name of a template or --strategy; one of them is required.
    """
    if (name is None) == (strategy is None):
        raise TemplateError("Pass either a template name or --strategy, for example --strategy full_shard.")
    if wrap == "layer" and min_num_params is not None:
        raise TemplateError("--min-num-params needs --wrap size.")
    template = templates.find_template(name or ("no_shard" if strategy == "no_shard" else f"fsdp2_{strategy}"))
    if wrap is not None:
        template = replace(template, min_num_params=templates.DEFAULT_MIN_NUM_PARAMS if wrap == "size" else None)
    given: dict[str, Any] = {
        "version": fsdp_version,
        "is_offloaded": offload or None,
        "min_num_params": min_num_params,
        "wrap_class": wrap_class,
        "num_machines": num_machines,
        "num_processes": num_processes,
    }
    changed = replace(template, **{key: value for key, value in given.items() if value is not None})
    text = templates.render(changed, str(output or "FILE"))
    if output is None:
        print(text, end="")
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TemplateError(f"Cannot write {output}: {error.strerror}. Choose another --output.") from error


@config_app.command("render-all", hidden=True)
def render_all() -> None:
    """Rewrite the shipped templates in a checkout of the repository."""
    for template in templates.shipped_templates():
        file = shipped_directory("accelerate_configs") / f"{template.name}.yaml"
        file.write_text(templates.render(template), encoding="utf-8")


@config_app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="An Accelerate config file.")],
    model: Annotated[
        Optional[str], typer.Option(help="Directory or Hub id of the model, to check the wrap classes.")
    ] = None,
) -> None:
    """Report all faults of a config together; exit status 1 if there are any."""
    classes = {type(module).__name__ for module in validate.build_on_meta(model).modules()} if model else None
    for line in describe_source(model) if model else ():
        print(line)
    faults = validate.find_faults(validate.read_config(file), classes)
    if faults:
        raise TemplateError(f"{file} has {count(len(faults), 'fault')}:\n  - " + "\n  - ".join(faults))
    print(f"{file}: no faults found")
