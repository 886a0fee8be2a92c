"""Prints how long the parts of this project are, and fails where one is longer than its limit. `make lint` runs it."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_fsdp_recipes"
CORE = ("loading", "checkpointing", "export", "callback.py", "patches.py", "distributed.py", "errors.py")


def python_files(*places: Path) -> list[Path]:
    return [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]


def num_lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def longest_function(files: list[Path]) -> int:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, functions)]
    return max(node.end_lineno - node.lineno for node in nodes if node.end_lineno)


def main() -> int:
    package, docs = python_files(PACKAGE), [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    rows = [
        ("hf_fsdp_recipes", num_lines(package), 5500),
        ("  core: loading to errors", num_lines(python_files(*(PACKAGE / name for name in CORE))), 3200),
        ("  tools", num_lines(python_files(PACKAGE / "tools")), 1300),
        ("replaced functions", len(re.findall(r"^\w+ = Patch\(", (PACKAGE / "patches.py").read_text(), re.M)), 4),
        ("longest module", max(num_lines([file]) for file in package), 300),
        ("longest function", longest_function(package), 50),
        ("recipes/sft.py", num_lines([ROOT / "recipes" / "sft.py"]), 170),
        ("tests", num_lines(python_files(ROOT / "tests")), 8000),
        ("benchmarks", num_lines(python_files(ROOT / "benchmarks")), 1500),
        ("docs and README", num_lines(docs), 2200),
        ("README.md", num_lines([ROOT / "README.md"]), 120),
    ]
    for name, found, limit in rows:
        print(f"{name:<28}{found:>7,} of {limit:>6,}{'  TOO LONG' if found > limit else ''}")
    return any(found > limit for _, found, limit in rows)


if __name__ == "__main__":
    sys.exit(main())
