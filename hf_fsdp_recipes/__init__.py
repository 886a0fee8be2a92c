"""FSDP recipes for Accelerate, Trainer and TRL: load without blow-ups, save without loss, export at disk speed.

The names below are the public Python interface. They are imported on first use, so that the command line starts without
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_fsdp_recipes.callback import ShardedCheckpointCallback
    from hf_fsdp_recipes.checkpointing.accelerator_state import save_checkpoint
    from hf_fsdp_recipes.checkpointing.download import fetch_checkpoint
    from hf_fsdp_recipes.checkpointing.resume import keep_global_batch
    from hf_fsdp_recipes.checkpointing.verification import latest_checkpoint
    from hf_fsdp_recipes.export.from_checkpoint import export_checkpoint
    from hf_fsdp_recipes.export.from_model import export_model
    from hf_fsdp_recipes.loading.load_model import load_model
    from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback, place_before_reporters
    from hf_fsdp_recipes.training.build import build_trainer
    from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer

__version__ = "0.2.0.dev0"
__all__ = [
    "MetricsCallback",
    "ShardedCheckpointCallback",
    "build_trainer",
    "export_checkpoint",
    "export_model",
    "fetch_checkpoint",
    "keep_global_batch",
    "latest_checkpoint",
    "load_model",
    "place_before_reporters",
    "save_checkpoint",
    "sharded_optimizer",
]

_MODULES = {
    "MetricsCallback": "metrics.metrics_callback",
    "ShardedCheckpointCallback": "callback",
    "build_trainer": "training.build",
    "export_checkpoint": "export.from_checkpoint",
    "export_model": "export.from_model",
    "fetch_checkpoint": "checkpointing.download",
    "keep_global_batch": "checkpointing.resume",
    "latest_checkpoint": "checkpointing.verification",
    "load_model": "loading.load_model",
    "place_before_reporters": "metrics.metrics_callback",
    "save_checkpoint": "checkpointing.accelerator_state",
    "sharded_optimizer": "training.sharded_optimizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
