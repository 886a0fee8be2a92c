"""Prints how large the parts of this project are, and fails where one is larger than its limit. `make lint` runs it."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_fsdp_recipes"


def python_files(*places: Path) -> list[Path]:
    return [
        file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])
    ]


def num_lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def num_nodes(files: list[Path]) -> int:
    """Return the number of syntax nodes: unlike lines, they do not depend on how the code is formatted."""
    return sum(1 for file in files for _ in ast.walk(ast.parse(file.read_text())))


def longest_function(files: list[Path]) -> int:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, functions)
    ]
    return max(node.end_lineno - node.lineno for node in nodes if node.end_lineno)


def main() -> int:
    package, docs = python_files(PACKAGE), [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    rows = [
        ("hf_fsdp_recipes, syntax nodes", num_nodes(package), 46_000),
        (
            "replaced functions",
            len(re.findall(r"^\w+ = Patch\(", (PACKAGE / "patches.py").read_text(), re.M)),
            4,
        ),
        ("longest module", max(num_lines([file]) for file in package), 300),
        ("longest function", longest_function(package), 50),
        ("recipes/sft.py", num_lines([ROOT / "recipes" / "sft.py"]), 170),
        ("docs and README", num_lines(docs), 2200),
        ("README.md", num_lines([ROOT / "README.md"]), 120),
    ]
    for name, found, limit in rows:
        print(f"{name:<32}{found:>7,} of {limit:>6,}{'  TOO LONG' if found > limit else ''}")
    return any(found > limit for _, found, limit in rows)


if __name__ == "__main__":
    sys.exit(main())
