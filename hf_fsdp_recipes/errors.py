"""The exceptions of this package, one class per package. Each message states the problem, the value and the fix.

`distributed.exit_with_message` turns them into one line on stderr and an exit status.
"""


class RecipeError(Exception):
    """An error that the user can fix. Base class of all exceptions below.

    Attributes:
        is_agreed: every rank raises this error, so none is still waiting in a collective.
    """

    is_agreed = False


class UnexpectedError(RecipeError):
    """An exception of another class; on the rank where it occurred, it is the cause."""


class PatchError(RecipeError):
    """An upstream function that this package patches or uses has moved or changed."""


class TemplateError(RecipeError):
    """An Accelerate config, or the launch around it, cannot work."""


class PreflightError(RecipeError):
    """The nodes of a job cannot work together; the message names the node."""


class LoadError(RecipeError):
    """A model or its checkpoint cannot be loaded as requested."""


class CheckpointError(RecipeError):
    """A resumable checkpoint could not be written or read."""


class SaveError(CheckpointError):
    """The last checkpoint of a run that has trained all its steps could not be written."""


class DivergenceError(CheckpointError):
    """The weights contain NaN or infinity."""


class ExportError(RecipeError):
    """The final weights could not be written, or failed verification."""


class DataError(RecipeError):
    """A dataset cannot be used for training."""


class PlanError(RecipeError):
    """A run cannot be planned as described."""
