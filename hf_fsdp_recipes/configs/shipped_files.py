"""Finds the shipped templates and recipes, which are folders in a checkout and package data in a wheel.

Does not import torch, so that commands that list, show or launch templates and recipes start fast.
"""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from hf_fsdp_recipes.configs.yaml_file import read_yaml
from hf_fsdp_recipes.errors import RecipeError, TemplateError

Folder = Literal["accelerate_configs", "recipes"]

# For each folder: what its files are called, the command that lists them, and the class of the error for an unknown name.
_FOLDERS: dict[Folder, tuple[str, str, type[RecipeError]]] = {
    "accelerate_configs": ("template", "hf-fsdp config list", TemplateError),
    "recipes": ("recipe", "hf-fsdp recipes list", RecipeError),
}
# Recipe fields that may be paths.
PATH_FIELDS = ("model_name_or_path", "tokenizer_name", "config_name", "chat_template_path", "dataset_name")


def shipped_directory(folder: Folder) -> Path:
    """Return the directory of the shipped templates or recipes, in a checkout or in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def shipped_recipes() -> list[Path]:
    """Return the shipped recipes, sorted by name. YAML files that set no output_dir, such as skypilot.yaml, are not recipes."""
    files = sorted(shipped_directory("recipes").glob("*.yaml"))
    return [file for file in files if "\noutput_dir:" in file.read_text(encoding="utf-8")]


def find_file(folder: Folder, name: str | Path, error_class: type[RecipeError] | None = None) -> Path:
    """Return the path of a file: as given or, if there is none, of the shipped file of that name; .yaml can be left out.

    A shipped file is also found by its path in a checkout, such as recipes/qwen3_8b_lora.yaml.

    Raises:
        TemplateError, RecipeError or `error_class`: neither file exists. The message lists the shipped files with similar names.
    """
    directory, relative = shipped_directory(folder), str(name).removeprefix(f"{folder}/")
    for file in (str(name), f"{name}.yaml", directory / relative, directory / f"{relative}.yaml"):
        if os.path.exists(file) and not os.path.isdir(file):  # noqa: PTH110, PTH112, Path raises for names that are too long
            return Path(file)
    kind, command, default_class = _FOLDERS[folder]
    close = get_close_matches(Path(relative).stem, [file.stem for file in directory.glob("*.yaml")], cutoff=0.5)
    advice = f"Similar names: {', '.join(close)}. " if close else ""
    raise (error_class or default_class)(
        f"{name} is neither a file nor a shipped {kind}. {advice}Check the path, or choose a name from `{command}`."
    )


def read_recipe(name: str | Path, error_class: type[RecipeError] = RecipeError) -> dict[str, Any]:
    """Return the keys and values of a recipe, given as a file or as the name of a shipped recipe.

    A relative path in a recipe is looked up in the current directory first, then in the recipe's folder.

    Raises:
        RecipeError or `error_class`: the recipe cannot be found or read, or is not a YAML mapping.
    """
    file = find_file("recipes", name, error_class)
    values = read_yaml(file, error_class, "Set at least model_name_or_path.")
    values |= {key: _locate(values[key], file.parent) for key in PATH_FIELDS if key in values}
    for part in values["datasets"] if isinstance(values.get("datasets"), list) else ():
        if isinstance(part, dict) and "path" in part:
            part["path"] = _locate(part["path"], file.parent)
    return values


def _locate(value: object, folder: Path) -> object:
    """Return the path at which `read_recipe` finds the value of a path field; return a name on the Hub unchanged."""
    if not isinstance(value, str) or not value or os.path.exists(value):  # noqa: PTH110, as above
        return value
    return str(folder / value) if os.path.exists(folder / value) else value  # noqa: PTH110
