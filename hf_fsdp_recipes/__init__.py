"""FSDP recipes for Accelerate, Trainer and TRL.

They load without full copies, save without loss and export at disk speed. `__all__` lists the
public Python interface. Each name is imported on first use, so that the command line starts without
torch. Importing this package replaces no function of another package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_fsdp_recipes.export.export import export_checkpoint as export_checkpoint
    from hf_fsdp_recipes.export.export import export_model as export_model
    from hf_fsdp_recipes.loading.load_model import load_model as load_model
    from hf_fsdp_recipes.metrics.callback import MetricsCallback as MetricsCallback
    from hf_fsdp_recipes.saving.callback import (
        ShardedCheckpointCallback as ShardedCheckpointCallback,
    )
    from hf_fsdp_recipes.saving.resume import keep_global_batch as keep_global_batch
    from hf_fsdp_recipes.saving.resume import latest_checkpoint as latest_checkpoint
    from hf_fsdp_recipes.training.sharded_optimizer import sharded_optimizer as sharded_optimizer

__version__ = "1.0.0"
_MODULES = {
    "MetricsCallback": "metrics.callback",
    "ShardedCheckpointCallback": "saving.callback",
    "export_checkpoint": "export.export",
    "export_model": "export.export",
    "keep_global_batch": "saving.resume",
    "latest_checkpoint": "saving.resume",
    "load_model": "loading.load_model",
    "sharded_optimizer": "training.sharded_optimizer",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
