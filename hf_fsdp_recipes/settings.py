"""Reads YAML files of settings: recipes and Accelerate configs."""

from pathlib import Path
from typing import Any

import yaml

from hf_fsdp_recipes.errors import RecipeError, explained

Settings = dict[str, Any]


def read_settings(file: Path) -> Settings:
    """Return the settings in a file.

    Raises a RecipeError if the file is unreadable, is no YAML mapping, or sets a name twice.
    """
    with explained(RecipeError, f"{file} cannot be read"):
        text = file.read_text()
        settings = yaml.safe_load(text)
        node = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{file} is no list of `name: value` lines.")
    names = [key.value for key, _ in node.value]
    for name in settings:
        if names.count(name) > 1:  # YAML would use the last value
            raise RecipeError(f"{name} is set twice in {file}. Remove one of the two.")
    return settings
