"""The tested versions of upstream packages, and the error if one of their names has moved."""

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


def check_is_read(name: str, reader: Any, remains: str) -> None:
    """Raise a PatchError if a function does not read an attribute that this package sets for it."""
    code = reader.__code__
    if name not in code.co_names + code.co_consts:
        raise patch_error(
            reader.__module__,
            f"{reader.__qualname__} does not read {name}, so this package cannot set it",
            remains,
        )
