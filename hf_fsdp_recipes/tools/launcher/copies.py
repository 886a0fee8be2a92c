"""Copies shipped files for the user: a recipe with the files that it names, and launch.slurm for one cluster."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from hf_fsdp_recipes.configs.shipped_files import PATH_FIELDS, find_file, shipped_directory
from hf_fsdp_recipes.configs.yaml_file import read_yaml
from hf_fsdp_recipes.errors import RecipeError, first_sentence


def describe_recipe(recipe: Path) -> tuple[str, str]:
    """Return the template that the comment at the top of a recipe names, and the comment's first sentence without links."""
    commands, _, rest = recipe.read_text(encoding="utf-8").partition("\n#\n")
    template = commands.partition("--accelerate_config ")[2].split(maxsplit=1)[0]
    sentence = first_sentence(rest.partition("\n\n")[0].removeprefix("# ").replace("\n# ", " "))
    return template, re.sub(r" \([^)]*\)", "", sentence).rstrip(".")


def copy_recipe(name: str, directory: Path) -> list[Path]:
    """Copy a shipped recipe and the files that it names to a directory; return the paths of the copies.

    Raises a RecipeError, and copies nothing, if the directory already has one of the files.
    """
    source = find_file("recipes", name)
    names = [source.name]
    if source.suffix == ".yaml":
        values = read_yaml(source, RecipeError, "Copy another recipe.")
        names += [str(values[key]) for key in PATH_FIELDS if (source.parent / str(values.get(key))).is_file()]
    files = {directory / each: (source.parent / each).read_text(encoding="utf-8") for each in names}
    write_new(files)
    return list(files)


def render_slurm_script(options: Mapping[str, object], container: str | None) -> str:
    """Return the text of launch.slurm with the given sbatch options.

    Its job trains in `container` if that is given, otherwise in the current Python environment. If `container` is the
    path of an image file, the path is made absolute.
    """
    directives = "".join(f"#SBATCH --{name}={value}\n" for name, value in options.items() if value is not None)
    text = (shipped_directory("recipes") / "launch.slurm").read_text(encoding="utf-8")
    text = text.replace("#SBATCH ", f"{directives}#SBATCH ", 1)
    if container:
        if Path(container).is_file():  # pyxis takes a name without a slash for an image in a registry
            container = str(Path(container).absolute())
        return text.replace("${CONTAINER:-}\n", f"${{CONTAINER:-{shlex.quote(container)}}}\n", 1)
    text = text.replace(".venv if it exists, else the environment sbatch was called in", "the one that wrote this file")
    environment = sys.prefix if sys.prefix != sys.base_prefix else os.environ.get("CONDA_PREFIX") or ".venv"
    return text.replace("${VENV:-.venv}\n", f"${{VENV:-{shlex.quote(environment)}}}\n", 1)


def write_new(files: Mapping[Path, str]) -> None:
    """Write text files; raise RecipeError before writing anything if any of them exists."""
    for file in files:
        if file.exists():
            raise RecipeError(f"{file} exists. Move it, or run this in another directory.")
    try:
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{error.filename} cannot be written: {error.strerror}. Choose another directory.") from error
