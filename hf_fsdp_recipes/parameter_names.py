"""Maps the names of wrapped parameters to their names in checkpoints.

FSDP1, activation checkpointing, torch.compile and PEFT all add parts to a parameter's name.
"""

import re

_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_PEFT_PREFIX = "base_model.model."
_PEFT_BASE = re.compile(r"(\.base_layer)+\.")  # repeated if PEFT adapts several parameters of a module
_PEFT_SAVED_MODULE = re.compile(r"\.(modules_to_save\.[^.]+|original_module)\.")
_ADAPTER = re.compile(r"\.(lora_|modules_to_save\.|trainable_tokens_|ia3_|oft_|boft_|hada_|lokr_|vera_)")
_ADAPTER_NAME = re.compile(_ADAPTER.pattern + r"(?:(?<=\.)|[^.]*\.)([^.]+)")


def without_wrappers(name: str) -> str:
    """Return the name without the parts that FSDP1, activation checkpointing and torch.compile add."""
    return _WRAPPERS.sub("", name)


def is_adapter(name: str) -> bool:
    """Return whether PEFT added this parameter, including trained copies of modules (`modules_to_save`)."""
    return name.startswith(_PEFT_PREFIX) and _ADAPTER.search(name) is not None


def in_base_model(name: str) -> str:
    """Return the parameter's name in the transformers model.

    `base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight` becomes
    `model.layers.0.self_attn.q_proj.weight`.
    """
    name = without_wrappers(name)
    if name.startswith(_PEFT_PREFIX):
        name = _PEFT_SAVED_MODULE.sub(".", _PEFT_BASE.sub(".", name[len(_PEFT_PREFIX) :]))
    return name


def adapter_of(name: str) -> str | None:
    """Return the name of the adapter that a parameter belongs to, or None if PEFT did not add it."""
    found = _ADAPTER_NAME.search(name) if is_adapter(name) else None
    return found.group(2) if found else None


def without_adapter_name(name: str, adapter_name: str) -> str:
    """Return an adapter tensor's name as in PEFT's files, which omit the adapter's name."""
    name = name.replace(f".modules_to_save.{adapter_name}.", ".").replace(f".{adapter_name}.", ".")
    return name.removesuffix(f".{adapter_name}")
