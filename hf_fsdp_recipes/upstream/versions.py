"""The tested versions of upstream packages, and the error if one of their names has moved."""

import inspect
from importlib.metadata import version
from typing import Any

from hf_fsdp_recipes.errors import PatchError

TESTED = {"accelerate": "1.13 to 1.15", "torch": "2.11 to 2.15", "transformers": "5.14 to 5.24"}


def patch_error(module: str, problem: str, remains: str) -> PatchError:
    """Return the error for a name of a module that has moved. `remains` says what still works."""
    package = module.partition(".")[0]
    return PatchError(
        f"{problem}: {package} {version(package)} is installed, {TESTED[package]} is tested. "
        f"Install a tested version; {remains}."
    )


def check_has(owner: object, name: str, remains: str) -> None:
    """Raise a PatchError if an object lacks an attribute that this package sets."""
    if not hasattr(owner, name):
        kind = type(owner)
        problem = f"{kind.__name__} has no {name}, so this package cannot set it"
        raise patch_error(kind.__module__, problem, remains)


def check_is_read(package: str, name: str, reader: Any, remains: str) -> None:
    """Raise a PatchError if a function does not read an attribute that this package sets for it.

    If another package has wrapped the function, nothing is checked.
    """
    code = getattr(inspect.unwrap(reader), "__code__", None)
    if code is None or f"/{package}/" not in code.co_filename:
        return
    if name not in code.co_names + code.co_consts:
        problem = f"{reader.__qualname__} does not read {name}, so this package cannot set it"
        raise patch_error(package, problem, remains)
