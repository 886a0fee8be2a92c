"""The errors of this package: one class a room, each message gives the value, the rule and the remedy.

Does not format tracebacks or decide exit codes; `ranks.exit_with_message` does that for the recipes.
"""


class RecipeError(Exception):
    """Say that a person has to change something; the base of all errors below.

    Attributes:
        is_agreed: every rank raises this very error, so all of them are still there.
    """

    is_agreed = False


class TemplateError(RecipeError):
    """Say that an Accelerate config or the launch around it cannot work."""


class PreflightError(RecipeError):
    """Say that the nodes of a job cannot work together, and which of them is the reason."""


class LoadError(RecipeError):
    """Say that a model or its checkpoint cannot be loaded as asked."""


class CheckpointError(RecipeError):
    """Say that a resumable checkpoint could not be written or read."""


class ExportError(RecipeError):
    """Say that the final weights could not be written or are not what they should be."""


class DataError(RecipeError):
    """Say that a dataset cannot be trained on as it is."""


class PlanError(RecipeError):
    """Say that a run cannot be planned as it is described."""
