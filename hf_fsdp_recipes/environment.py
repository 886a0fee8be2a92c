"""Reads a rank's environment: variables that `accelerate launch` sets, the process's CPU cores, installed packages."""

import functools
import os
from importlib.metadata import PackageNotFoundError, version


def is_true(value: object) -> bool:
    """Parse a flag from the environment or a YAML file as Accelerate does."""
    return str(value).lower() in ("true", "1", "yes", "on", "y", "t")


def is_fsdp_requested() -> bool:
    """Return whether the launcher or TrainingArguments turned FSDP on through Accelerate."""
    return is_true(os.environ.get("ACCELERATE_USE_FSDP", "false"))


def fsdp_version() -> int | None:
    """Return the FSDP version, 1 or 2, or None if FSDP is off."""
    return int(os.environ.get("FSDP_VERSION", "1")) if is_fsdp_requested() else None


def parallel_sizes() -> dict[str, str]:
    """Return the settings of the launcher's parallelism_config as strings, such as {"tp_size": "2"}."""
    prefix = "PARALLELISM_CONFIG_"
    return {key.removeprefix(prefix).lower(): os.environ[key] for key in os.environ if key.startswith(prefix)}


def mixed_precision() -> str | None:
    """Return the launcher's mixed precision ("no", "bf16", "fp16" or "fp8"), or None if it sets none."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
