"""What `accelerate launch` passed to this process: FSDP version and mixed precision."""

import os

from accelerate.utils import parse_flag_from_env


def fsdp_version() -> int | None:
    """Return 1 or 2, or None if FSDP is off."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return None
    return int(os.environ.get("FSDP_VERSION", "1"))


def mixed_precision() -> str | None:
    """Return no, bf16, fp16 or fp8, or None if the launcher did not set it."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION")
