"""Finds, lists and copies the shipped templates and recipes. A checkout has folders for them, a wheel has package data."""

import filecmp
import os
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer
import yaml

from hf_fsdp_recipes.errors import ToolError

Kind = Literal["template", "recipe"]
Name = Annotated[str, typer.Argument(help="A name from `list`, or a file.")]
FOLDERS: dict[Kind, str] = {"template": "accelerate_configs", "recipe": "recipes"}


def shipped_directory(kind: Kind) -> Path:
    """Return the directory of the shipped templates or recipes."""
    package = Path(__file__).resolve().parents[1]
    inside = package / FOLDERS[kind]
    return inside if inside.is_dir() else package.parent / FOLDERS[kind]


def shipped_files(kind: Kind) -> list[Path]:
    """Return the shipped templates or recipes, sorted by name. Only YAML files that set output_dir count as recipes."""
    files = sorted(shipped_directory(kind).glob("*.yaml"))
    return [file for file in files if kind == "template" or "\noutput_dir:" in file.read_text()]


def find_file(kind: Kind, name: str) -> Path:
    """Return the file `name` if it exists, otherwise the shipped file of that name. The suffix `.yaml` is optional.

    If neither exists, raises a ToolError that names similar shipped files, or all of them.
    """
    directory, relative = shipped_directory(kind), name.removeprefix(f"{FOLDERS[kind]}/")
    for file in (
        Path(name),
        Path(f"{name}.yaml"),
        directory / relative,
        directory / f"{relative}.yaml",
    ):
        if file.is_file():
            return file
    names = [file.stem for file in shipped_files(kind)]
    close = get_close_matches(Path(relative).stem, names, cutoff=0.5) or names
    raise ToolError(f"{name} is neither a file nor a shipped {kind}, such as {', '.join(close)}.")


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. If there is none, raise a ToolError with the file's name."""
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ToolError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ToolError(f"{file} is not a mapping of names to values.")
    return values


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
    def path(
        name: Annotated[
            Optional[str], typer.Argument(help="A name; default: the directory.")
        ] = None,
    ) -> None:
        """Print a file's path, for example for `accelerate launch --config_file`."""
        print(find_file(kind, name) if name else shipped_directory(kind))

    return app


def copy(name: Name) -> None:
    """Copy a recipe, the files that it names, and launch.slurm into the current directory, so that you can change them."""
    source = find_file("recipe", name)
    values = read_yaml(source).values() if source.suffix == ".yaml" else ()
    named = [value for value in values if isinstance(value, str)]
    files = {
        file: source.parent / file
        for file in [source.name, *named]
        if (source.parent / file).is_file()
    }
    files["launch.slurm"] = shipped_directory("recipe") / "launch.slurm"
    existing = [target for target in files if Path(target).exists()]
    if changed := [
        target for target in existing if not filecmp.cmp(target, files[target], shallow=False)
    ]:
        raise ToolError(
            f"{', '.join(changed)} exists here already. Move it, or use another directory."
        )
    for target in files:
        if target not in existing:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files[target], target)
        print(f"{'kept' if target in existing else 'wrote'} {target}")


def quickstart(context: typer.Context) -> None:
    """Fine-tune a 135M model on two CPU ranks, kill the run, resume it and check the answers, in about 5 minutes."""
    script = str(shipped_directory("recipe") / "quickstart.py")
    os.execv(sys.executable, [sys.executable, script, *context.args])
