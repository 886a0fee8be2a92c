"""Finds, lists and copies the shipped templates and recipes.

A checkout has folders for them, a wheel has package data.
"""

import os
import shutil
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Optional

from typer import Argument, Context, Option, Typer

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.settings import read_settings

Kind = Literal["template", "recipe"]
Name = Annotated[str, Argument(help="A name from `list`, or a file.")]
# Options of several commands.
TemplateOption = Annotated[
    str, Option("--accelerate_config", help="A template, or an Accelerate config.")
]
RecipeOption = Annotated[Optional[str], Option(help="A shipped recipe, or a file.")]
FOLDERS = {"template": "accelerate_configs", "recipe": "recipes"}


def shipped_directory(kind: Kind) -> Path:
    """Return the directory of the shipped templates or recipes."""
    package = Path(__file__).resolve().parents[1]
    folder = FOLDERS[kind]
    parent = package if (package / folder).is_dir() else package.parent
    return parent / folder


def shipped_files(kind: Kind) -> list[Path]:
    """Return the shipped templates or recipes, sorted by name.

    Only YAML files that set output_dir count as recipes.
    """
    return [
        file
        for file in sorted(shipped_directory(kind).glob("*.yaml"))
        if kind == "template" or "\noutput_dir:" in file.read_text()
    ]


def find_file(kind: Kind, name: str) -> Path:
    """Return the file `name` if it exists, otherwise the shipped file of that name.

    The suffix `.yaml` is optional. If neither exists, raises a ToolError that names similar shipped
    files, or all of them.
    """
    directory = shipped_directory(kind)
    relative = name.removeprefix(f"{directory.name}/")
    for path in (name, directory / relative):
        for file in (Path(path), Path(f"{path}.yaml")):
            if file.is_file():
                return file
    names = [file.stem for file in shipped_files(kind)]
    close = get_close_matches(Path(relative).stem, names, cutoff=0.5) or names
    raise ToolError(f"{name} is neither a file nor a shipped {kind}, such as {', '.join(close)}.")


def make_app(kind: Kind, command: Callable) -> Typer:
    """Return an app with the commands `list`, `show` and `path` for one kind of files.

    It also has the given command.
    """
    app = Typer(help=f"Commands for the shipped {kind}s.", no_args_is_help=True)

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
    def path(name: Name) -> None:
        """Print a file's path, for example for `accelerate launch --config_file`."""
        print(find_file(kind, name))

    app.command()(command)
    return app


def copy(name: Name) -> None:
    """Copy a recipe, the files that it names, and launch.slurm into the current directory.

    A file that exists already is kept. Files that are not in the recipe's folder are not copied.
    """
    recipe = find_file("recipe", name)
    sources = {recipe.name: recipe}
    for value in read_settings(recipe).values():
        source = recipe.parent / str(value)
        if isinstance(value, str) and ".." not in Path(value).parts and source.is_file():
            sources[value] = source
    sources["launch.slurm"] = shipped_directory("recipe") / "launch.slurm"
    for target, source in sources.items():
        if Path(target).exists():
            print(f"kept {target}, which exists already")
        else:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            print("wrote", target)


def quickstart(context: Context) -> None:
    """Fine-tune a 135M model on two CPU ranks, kill the run, resume it and check its answers.

    This takes about 5 minutes.
    """
    os.execl(
        sys.executable,
        sys.executable,
        shipped_directory("recipe") / "quickstart.py",
        *context.args,
    )
