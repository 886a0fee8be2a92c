"""The ranks of the checkpointing tests, for exports that a training run makes."""

from tests.saving.conftest import run, worlds  # noqa: F401
