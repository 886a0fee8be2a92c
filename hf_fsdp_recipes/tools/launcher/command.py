"""The commands `hf-fsdp sft`, `recipes`, `slurm` and others. torch is not imported until a script starts."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.configs.shipped_files import find_file, shipped_directory, shipped_recipes
from hf_fsdp_recipes.tools.launcher import copies

# Each name is a subcommand that starts the script recipes/NAME.py.
SCRIPTS = {
    "sft": "Fine-tune a model on texts, prompts or conversations.",
    "dpo": "Align a model with pairs of preferred and rejected answers (DPO).",
    "kto": "Align a model with answers that are good or bad (KTO).",
    "reward": "Train a reward model on pairs of preferred and rejected answers.",
    "grpo": "Train a model with rewards for the answers that it generates (GRPO).",
}
SCRIPT_HELP = (
    "Fields of the recipe and options of `accelerate launch`, such as `--num_processes 2`, can follow. The fields are those of "
    "TRL's {config}, ScriptArguments and ModelConfig, and those in docs/reference.md."
)
PASS_ON: dict[str, bool] = {"allow_extra_args": True, "ignore_unknown_options": True}

recipes_app = typer.Typer(help="List, print and copy the shipped recipes.", no_args_is_help=True)
slurm_app = typer.Typer(help="Write a batch script for Slurm.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the subcommands to `hf-fsdp`."""
    for name, purpose in SCRIPTS.items():
        config = f"{'Reward' if name == 'reward' else name.upper()}Config"
        text = f"{purpose} {SCRIPT_HELP.format(config=config)}"
        app.command(name, help=text, context_settings=PASS_ON)(_starter(f"{name}.py"))
    app.add_typer(recipes_app, name="recipes")
    app.add_typer(slurm_app, name="slurm")
    app.command("quickstart", context_settings=PASS_ON | {"help_option_names": []})(quickstart)


def _starter(script: str) -> Callable[..., None]:
    """Return a Typer command that starts the script on all ranks."""

    def start(
        context: typer.Context,
        accelerate_config: Annotated[
            str, typer.Option("--accelerate_config", help="A shipped template, or an Accelerate config file.")
        ],
        config: Annotated[
            Optional[str], typer.Option("--config", help="A shipped recipe, or a file of your own.")
        ] = None,
    ) -> None:
        template = find_file("accelerate_configs", accelerate_config)
        recipe = ["--config", str(find_file("recipes", config))] if config else []
        from hf_fsdp_recipes.tools.launcher.launch import launch_script  # loads torch

        launch_script(shipped_directory("recipes") / script, template, [*recipe, *context.args])

    return start


def quickstart(context: typer.Context) -> None:
    """Fine-tune a 135M model on two CPU ranks, kill the run, resume it and compare the model's answers; takes about 5 minutes.

    `hf-fsdp quickstart --help` lists the options.
    """
    script = str(shipped_directory("recipes") / "quickstart.py")
    os.execv(sys.executable, [sys.executable, script, *context.args])


@recipes_app.command("list")
def list_recipes() -> None:
    """List the shipped recipes: name, template, and what each trains."""
    for file in shipped_recipes():
        template, purpose = copies.describe_recipe(file)
        print(f"{file.stem:<24} {template:<27} {purpose}")


@recipes_app.command("show")
def show(name: Annotated[str, typer.Argument(help="A recipe from `recipes list`, or another shipped file.")]) -> None:
    """Print a recipe."""
    print(find_file("recipes", name).read_text(encoding="utf-8"), end="")


@recipes_app.command("copy")
def copy(name: Annotated[str, typer.Argument(help="A recipe from `recipes list`, or another shipped file.")]) -> None:
    """Copy a recipe and the shipped files that it names into the current directory, so that you can edit them."""
    for file in copies.copy_recipe(name, Path()):
        print(f"wrote {file}")


@slurm_app.command("init")
def init(
    partition: Annotated[str, typer.Option(help="Partition to submit to.")],
    account: Annotated[Optional[str], typer.Option(help="Account to charge.")] = None,
    nodes: Annotated[Optional[int], typer.Option(min=1, help="Number of nodes.")] = None,
    gpus_per_node: Annotated[Optional[int], typer.Option(min=1, help="GPUs on each node.")] = None,
    time: Annotated[Optional[str], typer.Option(help="Time limit, such as 24:00:00.")] = None,
    container: Annotated[
        Optional[str],
        typer.Option(
            help="Image for `srun --container-image` (pyxis): a file, written with its absolute path, or a name in a registry."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("launch.slurm"),
) -> None:
    """Write launch.slurm for your cluster. The script trains in the current Python environment, or in a container."""
    options = {"partition": partition, "account": account, "nodes": nodes, "gpus-per-node": gpus_per_node, "time": time}
    copies.write_new({output: copies.render_slurm_script(options, container)})
    print(f"wrote {output}. Submit from a directory that all nodes can read: sbatch {output} --config qwen3_8b_lora")
