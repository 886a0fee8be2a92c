"""`hf-fsdp recipes`: lists, prints and copies the shipped recipes. `hf-fsdp quickstart` starts the quickstart script."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools.files import describe, find_file, read_yaml, shipped_directory, shipped_files

recipes_app = typer.Typer(help="List, print and copy the shipped recipes.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A recipe from `recipes list`, or a file.")]


@recipes_app.command("list")
def list_recipes() -> None:
    """List the shipped recipes: name, template, and what each trains."""
    for file in shipped_files("recipe"):
        [template] = re.findall(r"--accelerate_config (\w+)", file.read_text())[:1] or [""]
        print(f"{file.stem:<22} {template:<14} {describe(file)}")


@recipes_app.command()
def show(name: Name) -> None:
    """Print a recipe."""
    print(find_file("recipe", name).read_text(), end="")


@recipes_app.command()
def copy(name: Name) -> None:
    """Copy a recipe, the files that it names, and launch.slurm into the current directory, so that you can change them."""
    source = find_file("recipe", name)
    values = read_yaml(source).values() if source.suffix == ".yaml" else ()
    named = [value for value in values if isinstance(value, str)]
    files = {file: source.parent / file for file in [source.name, *named] if (source.parent / file).is_file()}
    files["launch.slurm"] = shipped_directory("recipe") / "launch.slurm"
    if existing := [file for file in files if Path(file).exists()]:
        raise ToolError(f"{', '.join(existing)} exists here already. Move it, or use another directory.")
    for target, file in files.items():
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        print(f"wrote {target}")


def quickstart(context: typer.Context) -> None:
    """Fine-tune a 135M model on two CPU ranks, kill the run, resume it and check the answers, in about 5 minutes."""
    script = str(shipped_directory("recipe") / "quickstart.py")
    os.execv(sys.executable, [sys.executable, script, *context.args])
