"""Enables FSDP1 and FSDP2 on CPU ranks over gloo if the launcher requests them."""

import logging
import os

import torch

from hf_fsdp_recipes.environment import is_fsdp_requested, is_true
from hf_fsdp_recipes.errors import TemplateError
from hf_fsdp_recipes.patches import registry


def is_requested() -> bool:
    """Return whether the launcher requests FSDP on CPU ranks, or FSDP on a machine without an accelerator.

    The second case is needed because `accelerate launch` ignores `use_cpu: true` in FSDP configs: accelerate 1.15 sets
    ACCELERATE_USE_CPU only in its function `simple_launcher`.
    """
    flag = os.environ.get("ACCELERATE_USE_CPU")
    return is_fsdp_requested() and (not torch.accelerator.is_available() if flag is None else is_true(flag))


def enable() -> None:
    """Make Accelerate treat CPU ranks as FSDP ranks if the launcher requests FSDP on them. Idempotent.

    Call it on every rank before the first Accelerator is created. If a TrainingArguments has already been created, this is a
    collective, because the ranks then start their process group here.

    Raises:
        TemplateError: an Accelerator without FSDP already exists.
        PatchError: this version of Accelerate or torch is not supported.
    """
    if not is_requested():
        return
    os.environ["ACCELERATE_USE_CPU"] = "true"
    # Hide the warning of bitsandbytes on every CPU rank that it found no GPU kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    registry.apply("cpu ranks")
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    # An existing Accelerator has already dropped its FSDP plugin, so it is too late to patch.
    not_fsdp = (DistributedType.MULTI_CPU, DistributedType.NO)
    if AcceleratorState._shared_state.get("distributed_type") in not_fsdp:
        raise TemplateError(
            "an Accelerator was created before FSDP could be turned on for CPU ranks. Call load_model, "
            "ShardedCheckpointCallback or build_trainer before the first Accelerator or Trainer."
        )
    # If ACCELERATE_USE_CPU was not set when a TrainingArguments was created, Accelerate's state is for a single process. The
    # arguments read this state at each use, so they see all ranks once the state is initialized again.
    if PartialState._shared_state.get("distributed_type") == DistributedType.NO:
        PartialState._reset_state()
        PartialState(cpu=True)
