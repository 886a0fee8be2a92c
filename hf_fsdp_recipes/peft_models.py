"""Finds the PEFT model inside a wrapped model."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from peft import PeftModel


def find_peft_model(model: torch.nn.Module) -> "PeftModel | None":
    """Return the PeftModel in a possibly wrapped model, or None."""
    from peft import PeftModel

    return next((module for module in model.modules() if isinstance(module, PeftModel)), None)


def has_adapter(model: torch.nn.Module) -> bool:
    """Return whether a model has PEFT adapters."""
    return find_peft_model(model) is not None


def active_adapter(peft_model: "PeftModel") -> str:
    """Return the name of the active adapter."""
    active = peft_model.active_adapter
    return active if isinstance(active, str) else active[0]
