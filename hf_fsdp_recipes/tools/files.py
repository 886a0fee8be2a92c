"""Finds the shipped templates and recipes. A checkout has folders for them, and a wheel has package data. Imports no torch."""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from hf_fsdp_recipes.errors import ToolError, describe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Kind = Literal["template", "recipe"]
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
    for file in (Path(name), Path(f"{name}.yaml"), directory / relative, directory / f"{relative}.yaml"):
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


def read_config(name: str) -> "PreTrainedConfig":
    """Return the config of a directory or Hub id. A Hub id with a copy in models/ needs neither network nor access rights."""
    from transformers import AutoConfig

    copy = Path(__file__).with_name("models") / f"{name.replace('/', '--')}.json"
    try:
        return AutoConfig.from_pretrained(copy if copy.is_file() and not Path(name).is_dir() else name)
    except (OSError, ValueError) as error:
        raise ToolError(f"the config of {name} cannot be read: {describe(error)}") from error
