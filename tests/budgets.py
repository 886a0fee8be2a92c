"""Prints how large and how dense this project is, and fails above a limit. `make lint` runs it.

Size is counted in syntax nodes, so neither formatting nor packing changes it. A line of code is one
that holds more than a comment or a docstring.

    python tests/budgets.py [--files]    # with --files, also a line for each file of the package
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
DISPLAYS = (ast.Tuple, ast.List)
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


def parse(file: Path) -> list[ast.AST]:
    """Return all syntax nodes of a file."""
    return list(ast.walk(ast.parse(file.read_bytes())))


def num_nodes(file: Path) -> int:
    return len(parse(file))


def num_code_lines(file: Path) -> int:
    """Return the number of lines that hold more than a comment or a docstring."""
    with file.open("rb") as stream:
        tokens = list(tokenize.tokenize(stream.readline))
    lines: set[int] = set()
    for token in tokens:
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in parse(file):
        if is_text_alone(node):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def is_text_alone(node: ast.AST) -> bool:
    """Return whether a statement is a docstring, or text in a place where nothing reads it."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def longest_function(file: Path) -> int:
    """Return the lines of the longest function, from `def` to its last line."""
    functions = [node for node in parse(file) if isinstance(node, FUNCTIONS)]
    return max((node.end_lineno - node.lineno + 1 for node in functions), default=0)


def num_multiple_assignments(file: Path) -> int:
    """Return the number of statements like `a = b = c` and `a, b = x, y`."""
    assignments = [node for node in parse(file) if isinstance(node, ast.Assign)]
    return sum(map(assigns_several, assignments))


def assigns_several(node: ast.Assign) -> bool:
    if len(node.targets) > 1:
        return True
    return isinstance(node.targets[0], DISPLAYS) and isinstance(node.value, DISPLAYS)


def num_classes(file: Path) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in parse(file))


def num_patches(file: Path) -> int:
    return len(re.findall(r"^\w+ = Patch\(", file.read_text(), re.MULTILINE))


def density(file: Path) -> float:
    """Return the syntax nodes of a line of code. A file of a few lines has none worth a limit."""
    lines = num_code_lines(file)
    return num_nodes(file) / lines if lines > 10 else 0.0


def print_files(package: list[Path]) -> None:
    """Print a table of the package's files, the densest first."""
    print("density  nodes  longest function  multiple assignments")
    for file in sorted(package, key=density, reverse=True):
        size = f"{density(file):7.1f} {num_nodes(file):6,}"
        found = f"{longest_function(file):16} {num_multiple_assignments(file):21}"
        print(f"{size}  {found}  {file.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="print a line for each file")
    options = parser.parse_args()
    package = sorted(PACKAGE.rglob("*.py"))
    if options.files:
        print_files(package)
    nodes = sum(map(num_nodes, package))
    docs = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    rows = [
        ("syntax nodes", nodes, 55_300),
        ("nodes a line of code", nodes / sum(map(num_code_lines, package)), 8.0),
        ("nodes a line, densest file", max(map(density, package)), 10.0),
        ("longest function", max(map(longest_function, package)), 50),
        ("multiple assignments", sum(map(num_multiple_assignments, package)), 0),
        ("classes in saving", sum(map(num_classes, (PACKAGE / "saving").glob("*.py"))), 8),
        ("replaced functions", sum(map(num_patches, package)), 4),
        ("docs and README, lines", sum(map(num_lines, docs)), 2200),
        ("README.md, lines", num_lines(ROOT / "README.md"), 120),
    ]
    for name, found, limit in rows:
        ending = "  TOO MUCH" if found > limit else ""
        print(f"{name:<28}{found:>8,.5g} of {limit:>6,}{ending}")
    return any(found > limit for _, found, limit in rows)


if __name__ == "__main__":
    sys.exit(main())
