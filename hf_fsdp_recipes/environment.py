"""Reads the flags that launchers and config files set."""

import os


def is_true(value: object) -> bool:
    """Parse a flag of the environment or of a YAML file as Accelerate does."""
    return str(value).lower() in ("true", "1", "yes", "on", "y", "t")


def is_fsdp_requested() -> bool:
    """Tell whether the launcher, or a TrainingArguments, turned FSDP on through Accelerate."""
    return is_true(os.environ.get("ACCELERATE_USE_FSDP", "false"))
