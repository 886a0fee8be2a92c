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

    Call it on every rank before the first Accelerator. Collective if a TrainingArguments exists: ranks then join here.

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
    _join_ranks()
    return True


def _join_ranks() -> None:
    # Without ACCELERATE_USE_CPU, a TrainingArguments created earlier initialized Accelerate's state for a single process. It
    # reads that state at each use, so it sees all ranks once the state is initialized again.
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if PartialState._shared_state.get("distributed_type") == DistributedType.NO:
        PartialState._reset_state()
        PartialState(cpu=True)


def _check_no_accelerator_exists() -> None:
    # An existing Accelerator has already dropped its FSDP plugin.
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    if AcceleratorState._shared_state.get("distributed_type") in (
        DistributedType.MULTI_CPU,
        DistributedType.NO,
    ):
        raise TemplateError(
            "an Accelerator was created before FSDP could be turned on for CPU ranks. Call load_model, "
            "ShardedCheckpointCallback or build_trainer before the first Accelerator or Trainer."
        )
