"""Enables FSDP1 and FSDP2 on CPU ranks over gloo if the launcher requests them."""

import logging
import os

from hf_fsdp_recipes.environment import is_fsdp_requested
from hf_fsdp_recipes.errors import TemplateError
from hf_fsdp_recipes.patches import registry
from hf_fsdp_recipes.patches.accelerate import use_cpu


def is_requested() -> bool:
    """Return whether the launcher requests FSDP on CPU ranks."""
    return is_fsdp_requested() and use_cpu()


def enable() -> bool:
    """Make Accelerate treat CPU ranks as FSDP ranks, if the launcher requests that. Idempotent.

    Call it on every rank before the first Accelerator or TrainingArguments; not a collective.

    Returns:
        Whether FSDP on CPU ranks is on.

    Raises:
        TemplateError: an Accelerator already exists.
        PatchError: this Accelerate or torch is not supported.
    """
    if not is_requested():
        return False
    os.environ["ACCELERATE_USE_CPU"] = "true"
    # bitsandbytes reports on every CPU rank that it found no GPU kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    registry.apply("cpu ranks")
    _check_no_accelerator_exists()
    return True


def _check_no_accelerator_exists() -> None:
    # An existing Accelerator has already dropped its FSDP plugin.
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    if AcceleratorState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
        raise TemplateError(
            "an Accelerator was created before FSDP could be turned on for CPU ranks. Call load_model, "
            "ShardedCheckpointCallback or build_trainer before the first Accelerator or Trainer."
        )
