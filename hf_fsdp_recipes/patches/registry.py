"""Declares, checks and applies the patches. Importing this package patches nothing.

`apply` checks every patch of a feature before it changes anything, so an upstream change causes one clear error instead of a
half-patched process. Importing TRL takes a second and 60 MB, so TRL is patched only when a process imports it.
"""

import contextlib
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, TypeAlias

from hf_fsdp_recipes.errors import PatchError

Original: TypeAlias = Callable[..., Any]  # the upstream function that a patch replaces
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
    upstream: str  # an issue or pull request, or the title of an issue to file
    depends_on: tuple[str, ...] = ()  # other packages whose versions matter
    is_copied: bool = False  # whether other modules import the function by name; their copies are then replaced too
    replacement: Original = field(init=False)

    def __call__(self, replacement: Original) -> Original:
        """Declare the decorated function as the replacement, and return it unchanged."""
        self.replacement = replacement
        _declared.append(self)
        return replacement

    @property
    def target(self) -> str:
        """The function's dotted path."""
        return self.signature.partition("(")[0]

    @property
    def package(self) -> str:
        """The upstream package that contains the function."""
        return self.target.partition(".")[0]

    @property
    def tested_with(self) -> str:
        """The versions the patch was tested with."""
        return versions_of(self.package, *self.depends_on)

    def find(self) -> tuple[type | ModuleType, str, Original]:
        """Return the upstream function's module or class, its name, and the function.

        Raises a PatchError if the function is gone or its parameters differ.
        """
        path, _, name = self.target.rpartition(".")
        expected = self.signature.partition("(")[2].rstrip(")").split(", ")
        owner: type | ModuleType | None = None
        found = None
        with contextlib.suppress(ImportError, AttributeError):
            owner = pkgutil.resolve_name(path)
            found = getattr(owner, name)
        if owner is None or found is None or list(inspect.signature(found).parameters)[: len(expected)] != expected:
            raise PatchError(
                f"{self.package} {version(self.package)} has no {self.signature}, which hf-fsdp-recipes patches for "
                f"{self.feature}. Install {self.tested_with}, the versions that it was tested with."
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
    """Apply all patches of a feature, or raise a PatchError and apply none. Idempotent; not a collective.

    A package that is not imported yet is checked and patched when the process imports it.
    """
    packages = {patch.package for patch in all_patches() if patch.feature == feature}
    for package in packages - sys.modules.keys():
        if (finder := _PatchOnImport(package, feature)) not in sys.meta_path:
            sys.meta_path.insert(0, finder)
    _apply(feature, packages & sys.modules.keys())


def _apply(feature: Feature, packages: set[str]) -> None:
    pending = [p for p in all_patches() if p.feature == feature and p.package in packages and p.target not in _applied]
    found = [(patch, *patch.find()) for patch in pending]
    for patch, owner, name, original in found:
        loaded = list(sys.modules.values()) if patch.is_copied else []
        copies = [module for module in loaded if getattr(module, "__dict__", {}).get(name) is original]
        for module in [owner, *copies]:
            setattr(module, name, _wrap(patch.replacement, original))
        _applied.add(patch.target)


@dataclass
class _PatchOnImport(MetaPathFinder):
    """Applies the patches that a feature makes to a package, right after the package is imported."""

    package: str
    feature: Feature
    is_searching: bool = field(default=False, compare=False)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the package's spec from the other finders, with a loader that also patches."""
        if fullname != self.package or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self.is_searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _apply(self.feature, {self.package})

            setattr(spec.loader, "exec_module", execute_and_patch)  # noqa: B010 - mypy refuses an assignment to a method
        return spec


def _wrap(replacement: Original, original: Original) -> Original:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return patched
