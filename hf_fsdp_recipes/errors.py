"""The exceptions of this package, all derived from RecipeError. Each message states the problem, the wrong value and the fix.

`distributed.exit_with_message` turns them into one line on stderr and an exit status.
"""

import re
from typing import Literal

# The exceptions that reading damaged JSON can raise.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class RecipeError(Exception):
    """An error that the user can fix. Base class of all exceptions below.

    Attributes:
        is_agreed: whether every rank raises this error. If so, no rank is left waiting in a collective.
    """

    is_agreed = False


class UnexpectedError(RecipeError):
    """Wraps another exception, which is this error's `__cause__` on the rank where it occurred."""


class PatchError(RecipeError):
    """An upstream function that this package patches or uses has moved or changed."""


class TemplateError(RecipeError):
    """The Accelerate config is invalid, or does not fit the ranks that were launched."""


class PreflightError(RecipeError):
    """The nodes of a job cannot work together, and the message names the node; or preflight was started with invalid flags."""


class LoadError(RecipeError):
    """A model or its checkpoint cannot be loaded as requested."""


class CheckpointError(RecipeError):
    """A resumable checkpoint could not be written or read."""


class SaveError(CheckpointError):
    """A run trained all its steps, but its last checkpoint could not be written, or its last upload failed."""


class DivergenceError(CheckpointError):
    """The weights contain NaN or infinity."""


class ExportError(RecipeError):
    """The final weights could not be written, or failed verification."""


class DataError(RecipeError):
    """A dataset cannot be used for training."""


class PlanError(RecipeError):
    """The description of a run to plan is invalid, or the planner does not support such a run."""


def summarize(error: BaseException, first: Literal["line", "sentence"] | None = None) -> str:
    """Return an error's text, or only its first line or sentence, for use within a message of this package.

    The text is a single line of at most 300 characters, without a final period. For an error without text, return its class name.
    """
    text = str(error).strip()
    if first == "line":
        text = text.partition("\n")[0]
    text = " ".join(text.split())
    if first == "sentence":
        text = first_sentence(text)
    return text[:300].rstrip(".!: ") or type(error).__name__


def first_sentence(text: str) -> str:
    """Return a text up to the end of its first sentence; "i.e." and "e.g." do not end it."""
    return re.split(r"(?<!i\.e)(?<!e\.g)\. ", text, maxsplit=1)[0]
