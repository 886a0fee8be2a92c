"""Lists the private names of upstream packages in this package, and where they are used.

Fails if one is used outside `hf_fsdp_recipes/upstream/`. `make lint` runs it. Besides names that
begin with an underscore, it finds imports from modules that upstream does not document.

    python tests/private_names.py
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = "hf_fsdp_recipes"
ROOM = ROOT / OURS / "upstream"
# Of namedtuples and argparse's parsers.
OF_PYTHON = {"_asdict", "_fields", "_make", "_replace", "_actions"}
OWN_FILES = {"_saving"}  # which this package writes
# Attributes that this package puts on the objects of others begin with this.
OWN_PREFIX = "_hf_fsdp"
UNDOCUMENTED = (
    "accelerate.commands",
    "accelerate.utils.fsdp_utils",
    "accelerate.utils.launch",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.launcher",
    "torch.multiprocessing.reductions",
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.dynamic_module_utils",
    "transformers.initialization",
    "transformers.integrations",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.quantizers.auto",
    "trl.kernels",
    "trl.trainer.utils",
)


def is_private(name: str) -> bool:
    is_dunder = name.startswith("__") and name.endswith("__")
    is_throwaway = not name.strip("_")
    return name.startswith("_") and not (is_dunder or is_throwaway or name.startswith(OWN_PREFIX))


def find_uses(source: str) -> list[tuple[int, str]]:
    """Return the private names in a module that are not the module's own, each with its line."""
    tree = ast.parse(source)
    own = find_own(tree) | OF_PYTHON | OWN_FILES
    skipped = find_docstrings(tree) | find_parts_of_texts(tree)
    uses = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = in_import(node)
        elif isinstance(node, ast.Attribute):
            names = [] if is_of_self(node) and node.attr in own else [node.attr]
        elif isinstance(node, ast.keyword):
            names = [node.arg or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            names = [name for name in in_text(node.value) if name not in own]
        else:
            continue
        line = getattr(node, "lineno", 0)
        uses |= {(line, name) for name in names if "." in name or is_private(name)}
    return sorted((line, name) for line, name in uses if name not in OF_PYTHON)


def find_own(tree: ast.AST) -> set[str]:
    """Return the names of the module's functions and of attributes that it sets on `self`."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif is_of_self(node) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    return own


def is_of_self(node: ast.AST) -> bool:
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_attribute and node.value.id in ("self", "cls")


def find_docstrings(tree: ast.AST) -> set[ast.AST]:
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {node.value for node in statements if isinstance(node.value, ast.Constant)}


def find_parts_of_texts(tree: ast.AST) -> set[ast.AST]:
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    return {part for text in texts for part in text.values}


def in_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the private and undocumented names that an import takes from upstream, in full."""
    base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
    for alias in node.names:
        name = f"{base}{alias.name}"
        root, *rest = name.split(".")
        is_ours = is_relative or root == OURS or root in sys.stdlib_module_names
        is_undocumented = any(f"{name}.".startswith(f"{module}.") for module in UNDOCUMENTED)
        if not is_ours and (is_undocumented or any(map(is_private, rest))):
            yield name


def in_text(text: str) -> Iterator[str]:
    """Yield the private names in a string of names only, such as an argument of `getattr`."""
    parts = [part for part in re.split(r"[\s.|()\\]+", text) if part]
    if all(part.isidentifier() for part in parts):
        yield from filter(is_private, parts)


def main() -> int:
    places: dict[str, list[str]] = defaultdict(list)
    wrong = []
    for file in sorted([*(ROOT / OURS).rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]):
        for line, name in find_uses(file.read_text()):
            place = f"{file.relative_to(ROOT)}:{line}"
            places[name].append(place)
            if not file.is_relative_to(ROOM):
                wrong.append(f"{place}: {name}")
    for name, used in sorted(places.items()):
        print(f"{name:<64} {', '.join(used)}")
    for use in wrong:
        print(f"{use} is private to another package. Use it in {ROOM.relative_to(ROOT)}/ only.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
