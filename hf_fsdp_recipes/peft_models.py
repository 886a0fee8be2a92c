"""Finds the PEFT model inside a wrapped model."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from peft import PeftModel

HEAD_FIELDS = ("id2label", "label2id", "pad_token_id")  # fields of a classifier's config that training may set


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


def describe_class(base: torch.nn.Module) -> dict[str, Any] | None:
    """Return the base model's class in the format of PEFT's `auto_mapping`, or None for a model with its own code.

    For a classifier, the result also holds the labels. PEFT records the class only for adapters without a task type. Other
    adapters need it too, because the config of the base checkpoint may declare another class: the base checkpoint of a
    reward model declares a causal language model.
    """
    cls = next(cls for cls in type(base).__mro__ if not cls.__name__.startswith("FSDP"))
    if not cls.__module__.startswith("transformers."):
        return None
    fields = {name: getattr(base.config, name, None) for name in HEAD_FIELDS} if hasattr(base, "num_labels") else {}
    return {"base_model_class": cls.__name__, "parent_library": cls.__module__} | fields
