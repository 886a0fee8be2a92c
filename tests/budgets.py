"""Prints how large and how dense this project is, and fails above a limit. `make lint` runs it.

Size is counted in syntax nodes, so neither formatting nor packing changes it. A line of code is one that holds
more than a comment or a docstring.

    python tests/budgets.py [--files]    # with --files, also the density of each file of the package
"""

import argparse
import ast
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_fsdp_recipes"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def num_nodes(file: Path) -> int:
    return sum(1 for _ in ast.walk(ast.parse(file.read_text())))


def num_code_lines(file: Path) -> int:
    """Return the number of lines that hold more than a comment or a docstring."""
    with file.open("rb") as stream:
        tokens = list(tokenize.tokenize(stream.readline))
    lines = set()
    for token in tokens:
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def longest_function(file: Path) -> int:
    nodes = ast.walk(ast.parse(file.read_text()))
    lengths = [node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, FUNCTIONS)]
    return max(lengths, default=0)


def density(file: Path) -> float:
    """Return the syntax nodes of a line of code. A file of a few lines has none worth a limit."""
    lines = num_code_lines(file)
    return num_nodes(file) / lines if lines > 10 else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="print the density of each file")
    options = parser.parse_args()
    package = sorted(PACKAGE.rglob("*.py"))
    if options.files:
        for file in sorted(package, key=density, reverse=True):
            print(f"{density(file):5.1f} {num_nodes(file):6,}  {file.relative_to(ROOT)}")
    nodes = sum(map(num_nodes, package))
    patches = (PACKAGE / "upstream" / "patches.py").read_text()
    docs = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    rows = [
        ("syntax nodes", nodes, 46_000),
        ("nodes a line of code", nodes / sum(map(num_code_lines, package)), 8.0),
        ("nodes a line, densest file", max(map(density, package)), 10.0),
        ("longest function", max(map(longest_function, package)), 50),
        ("replaced functions", len(re.findall(r"^\w+ = Patch\(", patches, re.M)), 4),
        ("docs and README, lines", sum(map(num_lines, docs)), 2200),
        ("README.md, lines", num_lines(ROOT / "README.md"), 120),
    ]
    for name, found, limit in rows:
        ending = "  TOO MUCH" if found > limit else ""
        print(f"{name:<28}{found:>8,.5g} of {limit:>6,}{ending}")
    return any(found > limit for _, found, limit in rows)


if __name__ == "__main__":
    sys.exit(main())
