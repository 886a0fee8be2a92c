"""Brings values into a form that can be compared: JSON, without times and absolute paths."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy
import torch

TIMES = re.compile(r"runtime|per_second|jit_compilation|_time$|_mem_")
NOT_FINITE = "not finite"


def plain(value: Any) -> Any:
    """Return a value as JSON has it, without times."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    return comparable(json.loads(json.dumps(value, default=repr, sort_keys=True)))


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: comparable(part) for key, part in value.items() if not TIMES.search(str(key))}
    if isinstance(value, list | tuple):
        return [comparable(part) for part in value]
    is_nan = isinstance(value, float) and value != value
    return "NaN" if is_nan else value  # NaN does not equal itself


def relative(path: str | None, place: Path) -> str | None:
    """Return a path as seen from `place`, in which it was written."""
    return None if path is None else os.path.relpath(place / path, place)


def trainer_state(state: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return a TrainerState with relative paths, without the entry that our callback adds."""
    state = plain(state)
    state["best_model_checkpoint"] = relative(state.get("best_model_checkpoint"), place)
    callbacks = state.get("stateful_callbacks") or {}
    state["stateful_callbacks"] = {
        name: found for name, found in callbacks.items() if name != "ShardedCheckpoints"
    }
    return state


def hashed(value: Any) -> Any:
    """Return a nested structure with a text for each tensor and array: form and hash."""
    if isinstance(value, torch.Tensor):
        return hash_tensor(value)
    if isinstance(value, numpy.ndarray):
        return hash_bytes(value.tobytes())
    if isinstance(value, dict):
        return {str(key): hashed(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [hashed(part) for part in value]
    return repr(value)


def hash_tensor(value: torch.Tensor) -> str:
    value = value.detach().contiguous()
    digest = hash_bytes(value.view(-1).view(torch.uint8).numpy().tobytes())
    is_finite = not value.is_floating_point() or bool(value.isfinite().all())
    return f"{value.dtype} {list(value.shape)} {digest}" + ("" if is_finite else f" {NOT_FINITE}")


def hash_bytes(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()[:12]
