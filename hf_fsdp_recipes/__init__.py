"""FSDP recipes for Accelerate, Trainer and TRL: load without blow-ups, save without loss, export at disk speed.

The names below are the whole public Python interface; they are imported on first use, so that the command
line and the templates work without waiting for torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "load_model": "hf_fsdp_recipes.loading.load_model",
    "build_trainer": "hf_fsdp_recipes.training.build",
    "ShardedCheckpointCallback": "hf_fsdp_recipes.callback",
    "latest_checkpoint": "hf_fsdp_recipes.checkpointing.layout",
    "export_model": "hf_fsdp_recipes.export.from_model",
    "export_checkpoint": "hf_fsdp_recipes.export.from_checkpoint",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
