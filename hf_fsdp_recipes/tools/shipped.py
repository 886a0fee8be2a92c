"""Commands that list and print the shipped templates and recipes, copy a recipe with its files, and run the quickstart."""

import filecmp
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools.files import Kind, find_file, read_yaml, shipped_directory, shipped_files

Name = Annotated[str, typer.Argument(help="A name from `list`, or a file.")]


def make_app(kind: Kind) -> typer.Typer:
    """Return an app with the commands `list`, `show` and `path` for one kind of files."""
    app = typer.Typer(help=f"Commands for the shipped {kind}s.", no_args_is_help=True)

    @app.command("list")
    def list_files() -> None:
        """List the names, each with the first line of its file."""
        for file in shipped_files(kind):
            print(f"{file.stem:<24} {file.read_text().splitlines()[0].removeprefix('# ')}")

    @app.command()
    def show(name: Name) -> None:
        """Print a file. Its first lines show the command that uses it."""
        print(find_file(kind, name).read_text(), end="")

    @app.command()
    def path(name: Annotated[Optional[str], typer.Argument(help="A name; default: the directory.")] = None) -> None:
        """Print a file's path, for example for `accelerate launch --config_file`."""
        print(find_file(kind, name) if name else shipped_directory(kind))

    return app


def copy(name: Name) -> None:
    """Copy a recipe, the files that it names, and launch.slurm into the current directory, so that you can change them."""
    source = find_file("recipe", name)
    values = read_yaml(source).values() if source.suffix == ".yaml" else ()
    named = [value for value in values if isinstance(value, str)]
    files = {file: source.parent / file for file in [source.name, *named] if (source.parent / file).is_file()}
    files["launch.slurm"] = shipped_directory("recipe") / "launch.slurm"
    existing = [target for target in files if Path(target).exists()]
    if changed := [target for target in existing if not filecmp.cmp(target, files[target], shallow=False)]:
        raise ToolError(f"{', '.join(changed)} exists here already. Move it, or use another directory.")
    for target in files:
        if target not in existing:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files[target], target)
        print(f"{'kept' if target in existing else 'wrote'} {target}")


def quickstart(context: typer.Context) -> None:
    """Fine-tune a 135M model on two CPU ranks, kill the run, resume it and check the answers, in about 5 minutes."""
    script = str(shipped_directory("recipe") / "quickstart.py")
    os.execv(sys.executable, [sys.executable, script, *context.args])
