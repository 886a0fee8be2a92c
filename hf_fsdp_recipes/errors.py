"""The exceptions of this package: one class for each part. Each message states the problem, the value and what to do."""


class RecipeError(Exception):
    """An error that the user can fix. Raised for recipes and their data; base class of all exceptions below."""


class PatchError(RecipeError):
    """An upstream function that this package replaces has moved or has changed its parameters."""


class LoadError(RecipeError):
    """A model cannot be loaded as requested, or is used before its weights are loaded."""


class CheckpointError(RecipeError):
    """A checkpoint could not be written, or cannot be resumed from."""


class ExportError(RecipeError):
    """A model could not be exported. Nothing is left behind; the model and its checkpoints are intact."""


class ToolError(RecipeError):
    """A tool of the command line cannot work with its arguments or its files."""


def describe(error: BaseException) -> str:
    """Return an error as one line: a RecipeError's message, and any other error with its class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, RecipeError) else f"{type(error).__name__}: {text}".removesuffix(": ")
