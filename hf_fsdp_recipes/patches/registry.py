"""Declares, guards and applies the patches.

A patch names an upstream function and its expected parameters. `apply` checks every patch of a feature before it changes
anything, so an upstream change causes one clear error instead of a half-patched process. Imports patch nothing.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, Literal

from hf_fsdp_recipes.errors import PatchError

Feature = Literal["cpu ranks", "size wrap", "loading", "checkpointing", "reduction dtype"]
# Of this package; importing one declares its patches.
MODULES = ("accelerate", "fsdp1", "peft", "torch", "transformers")
# What `make test-versions` passed with; a test compares it with setup.cfg.
TESTED_VERSIONS = {
    "torch": "2.11 to 2.15",
    "accelerate": "1.15",
    "transformers": "5.18 to 5.23",
    "trl": "1.16",
    "peft": "0.21",
    "bitsandbytes": "0.50",
}


@dataclass(frozen=True)
class Patch:
    """One upstream function and its replacement.

    Attributes:
        target: dotted path of the function, `package.module.Class.method`.
        parameters: the first parameters that it must have.
        feature: the feature that needs the patch; the argument of `apply`.
        changes: difference from upstream.
        reason: why upstream's behavior is not sufficient.
        upstream: an issue or pull request, or the title of one to file.
        tested_with: versions the patch was tested with.
        replacement: called as `replacement(original, *args, **kwargs)`.
    """

    target: str
    parameters: tuple[str, ...]
    feature: Feature
    changes: str
    reason: str
    upstream: str
    tested_with: str
    replacement: Callable[..., Any]

    @property
    def package(self) -> str:
        """The upstream distribution."""
        return self.target.partition(".")[0]

    def find(self) -> tuple[Any, str, Callable[..., Any]]:
        """Return the owner of the function, its name and the function itself.

        Raises:
            PatchError: it does not exist or has other parameters.
        """
        *path, name = self.target.split(".")
        owner, found = _import_longest(path), None
        if owner is not None:
            found = getattr(owner, name, None)
        actual = () if found is None else tuple(inspect.signature(found).parameters)
        if owner is None or found is None or actual[: len(self.parameters)] != self.parameters:
            raise PatchError(
                f"{self.package} {version(self.package)} has no {self.target}({', '.join(self.parameters)}), which "
                f"{self.feature} needs to patch. Install {self.tested_with}, the versions it was tested with."
            )
        return owner, name, found


def versions_of(*packages: str) -> str:
    """Return the versions that packages were tested with: `accelerate 1.15, trl 1.16`."""
    return ", ".join(f"{package} {TESTED_VERSIONS[package]}" for package in packages)


_declared: list[Patch] = []
_applied: set[str] = set()


def patch(
    target: str,
    *parameters: str,
    feature: Feature,
    changes: str,
    reason: str,
    upstream: str,
    tested_with: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as the replacement of an upstream function; see `Patch`."""

    def declare(replacement: Callable[..., Any]) -> Callable[..., Any]:
        _declared.append(Patch(target, parameters, feature, changes, reason, upstream, tested_with, replacement))
        return replacement

    return declare


def all_patches() -> list[Patch]:
    """Return every patch, in the order of the modules that declare them."""
    for name in MODULES:
        import_module(f"hf_fsdp_recipes.patches.{name}")
    return sorted(_declared, key=lambda patch: MODULES.index(patch.replacement.__module__.rpartition(".")[2]))


def apply(feature: Feature) -> None:
    """Apply all patches of a feature, or none. Idempotent; not a collective.

    Raises:
        PatchError: upstream has changed one of the functions.
    """
    pending = [patch for patch in all_patches() if patch.feature == feature and patch.target not in _applied]
    found = [(patch, *patch.find()) for patch in pending]
    for patch, owner, name, original in found:
        setattr(owner, name, _wrap(patch.replacement, original))
        _applied.add(patch.target)


def _import_longest(path: list[str]) -> Any:
    """Import the longest prefix of a dotted path that is a module, and look up the rest in it."""
    for length in range(len(path), 0, -1):
        try:
            owner: Any = import_module(".".join(path[:length]))
        except ImportError:
            continue
        for name in path[length:]:
            owner = getattr(owner, name, None)
        return owner
    return None


def _wrap(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return patched
