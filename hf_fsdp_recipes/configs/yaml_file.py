"""Reads a YAML file that a user wrote: a recipe or an Accelerate config."""

from pathlib import Path
from typing import Any

import yaml

from hf_fsdp_recipes.errors import RecipeError, summarize


class _Loader(yaml.SafeLoader):
    """Adds line numbers to errors, and refuses a mapping that sets a key twice (PyYAML would keep the last value)."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                problem = f"it sets {key.value} in line {lines[key.value]} and again"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[str(key.value)] = key.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date such as 2024-13-01
            problem = f"the value is invalid ({error})"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def read_yaml(path: str | Path, error_class: type[RecipeError], advice: str) -> dict[str, Any]:
    """Return the mapping in a YAML file. Not a collective.

    Args:
        error_class: the class of the error to raise if the file cannot be read, is not a mapping or sets a key twice.
        advice: a sentence on what to do about a file that is not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise error_class(f"{path} is not UTF-8 ({error.reason} at byte {error.start}). Convert it.") from error
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL character
        reason = getattr(error, "strerror", None) or error
        raise error_class(f"{path} cannot be read: {reason}. Check the path.") from error
    values = parse_yaml(text, str(path), error_class)
    if not isinstance(values, dict):
        raise error_class(f"{path} is empty or not a mapping of keys to values. {advice}")
    return values


def parse_yaml(text: str, name: str, error_class: type[RecipeError]) -> object:
    """Parse a YAML text; if it is invalid, raise `error_class` with a message that starts with `name`."""
    try:
        return _Loader(text).get_single_data()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"it contains the character {chr(error.character)!r}"
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = summarize(ValueError(error.problem or error.context))
    raise error_class(f"{name} is not valid YAML: {problem} in line {line}. Correct it.")
