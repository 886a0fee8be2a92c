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


def check(is_read: bool, package: str, name: str, remains: str) -> None:
    """Raise a PatchError if a package does not read an attribute that this package sets."""
    if not is_read:
        problem = f"{package} does not read {name}, so this package cannot set it"
        raise patch_error(package, problem, remains)


def reads(package: str, function: Any, name: str) -> bool:
    """Return whether a package's function reads a name, or is wrapped by another package."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or f"/{package}/" not in code.co_filename:
        return True
    return name in code.co_names + code.co_consts
