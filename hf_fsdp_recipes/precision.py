"""Converts between dtypes and their names, in torch's ("bfloat16") and Accelerate's ("bf16") spelling."""

import torch

from hf_fsdp_recipes.environment import mixed_precision

TRAINING_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_dtype(name: str) -> torch.dtype | None:
    """Return the dtype with this name, or None for "no" (no mixed precision); raise a ValueError for other names."""
    if name.lower() in ("no", "none", "false"):
        return None
    for short_name, dtype in TRAINING_DTYPES.items():
        if name.lower() in (short_name, format_dtype(dtype)):
            return dtype
    names = ", ".join(format_dtype(dtype) for dtype in TRAINING_DTYPES.values())
    raise ValueError(f"unknown dtype {name!r}; use {names} or no")


def format_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def mixed_precision_dtype() -> torch.dtype | None:
    """Return the mixed-precision dtype of the Accelerator, or of the launcher if there is none yet; None if it is not 16-bit."""
    from accelerate.state import AcceleratorState, is_initialized

    name = AcceleratorState().mixed_precision if is_initialized() else mixed_precision()
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name or "no")
