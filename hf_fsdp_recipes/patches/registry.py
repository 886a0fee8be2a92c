"""Declares, checks and applies the patches. Importing this package patches nothing.

`apply` checks every patch of a feature before it changes anything, so an upstream change causes one clear error instead of a
half-patched process.
"""

import contextlib
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import Any, Literal

from hf_fsdp_recipes.errors import PatchError

Feature = Literal["cpu ranks", "size wrap", "loading", "checkpointing", "reduction dtype"]
# Modules of this package that declare patches when imported.
MODULES = ("accelerate", "fsdp1", "peft", "torch", "transformers", "trl")
# Versions with which `make test-versions` passed; a test compares them with setup.cfg.
TESTED_VERSIONS = {
    "torch": "2.13 to 2.15",
    "accelerate": "1.15",
    "transformers": "5.18 to 5.23",
    "trl": "1.16",
    "peft": "0.21",
    "bitsandbytes": "0.50",
}


@dataclass
class Patch:
    """Declares the decorated function as the replacement of an upstream function: `replacement(original, *args, **kwargs)`."""

    signature: str  # dotted path of the function and the first parameters it must have: `package.Class.method(self, x)`
    feature: Feature  # the feature that needs the patch; the argument of `apply`
    changes: str  # difference from upstream
    reason: str  # why upstream's behavior is not sufficient
    upstream: str  # an issue or pull request, or the title of one to file
    depends_on: tuple[str, ...] = ()  # other packages whose versions matter
    is_copied: bool = False  # whether other modules import the function by name, so that their copies are replaced, too
    replacement: Callable[..., Any] = field(init=False)

    def __call__(self, replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the replacement."""
        self.replacement = replacement
        _declared.append(self)
        return replacement

    @property
    def target(self) -> str:
        """The function's dotted path."""
        return self.signature.partition("(")[0]

    @property
    def package(self) -> str:
        """The upstream distribution."""
        return self.target.partition(".")[0]

    @property
    def tested_with(self) -> str:
        """The versions the patch was tested with."""
        return versions_of(self.package, *self.depends_on)

    def find(self) -> tuple[Any, str, Callable[..., Any]]:
        """Return the function's owner and name, and the function; raise a PatchError if it is gone or has other parameters."""
        path, _, name = self.target.rpartition(".")
        expected = self.signature.partition("(")[2].rstrip(")").split(", ")
        owner = found = None
        with contextlib.suppress(ImportError, AttributeError):
            owner = pkgutil.resolve_name(path)
            found = getattr(owner, name)
        if found is None or list(inspect.signature(found).parameters)[: len(expected)] != expected:
            raise PatchError(
                f"{self.package} {version(self.package)} has no {self.signature}, which {self.feature} needs to patch. Install "
                f"{self.tested_with}, the versions it was tested with."
            )
        return owner, name, found


def versions_of(*packages: str) -> str:
    """Return the versions that packages were tested with: `accelerate 1.15, trl 1.16`."""
    return ", ".join(f"{package} {TESTED_VERSIONS[package]}" for package in packages)


_declared: list[Patch] = []
_applied: set[str] = set()


def all_patches() -> list[Patch]:
    """Return every patch, in the order of the modules that declare them."""
    for name in MODULES:
        import_module(f"hf_fsdp_recipes.patches.{name}")
    return sorted(_declared, key=lambda patch: MODULES.index(patch.replacement.__module__.rpartition(".")[2]))


def apply(feature: Feature) -> None:
    """Apply all patches of a feature, or raise a PatchError and apply none. Idempotent; not a collective."""
    pending = [patch for patch in all_patches() if patch.feature == feature and patch.target not in _applied]
    found = [(patch, *patch.find()) for patch in pending]
    for patch, owner, name, original in found:
        loaded = list(sys.modules.values()) if patch.is_copied else []
        copies = [module for module in loaded if getattr(module, "__dict__", {}).get(name) is original]
        for module in [owner, *copies]:
            setattr(module, name, _wrap(patch.replacement, original))
        _applied.add(patch.target)


def _wrap(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return patched
