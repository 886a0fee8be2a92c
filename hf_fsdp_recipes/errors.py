"""The exceptions of this package, one class for each part.

A message states the problem, the value and what to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RecipeError(Exception):
    """An error that the user can fix, for example in a recipe or its data.

    Base class of all exceptions below.
    """


class PatchError(RecipeError):
    """An upstream function that this package replaces, or an attribute that it sets, has moved."""


class LoadError(RecipeError):
    """A model cannot be loaded as requested, or is used before its weights are loaded."""


class CheckpointError(RecipeError):
    """A checkpoint could not be written, or cannot be resumed from."""


class WeightsError(CheckpointError):
    """Weights contain NaN or infinity, so that training cannot go on."""


class ExportError(RecipeError):
    """A model could not be exported.

    No files are left behind. The model and its checkpoints are intact.
    """


class ToolError(RecipeError):
    """A command-line tool cannot work with its arguments or files."""


def describe(error: BaseException) -> str:
    """Return an error's message on one line, after its class unless the error is a RecipeError."""
    text = " ".join(str(error).split())
    if isinstance(error, RecipeError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


@contextmanager
def explained(kind: type[RecipeError], problem: str) -> Iterator[None]:
    """Raise an error of the body as one of this package, which says what has failed."""
    try:
        yield
    except Exception as error:
        raise kind(f"{problem}: {describe(error)}") from error
