"""Lets Trainer and Accelerate save as usual, but records the sharded state meant for torch DCP."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch.distributed.checkpoint as dcp
from transformers import Trainer

from hf_fsdp_recipes.checkpointing.host_copy import State
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.upstream.transformers_internals import GET_OUTPUT_DIR, PUSH_CHECKPOINT


@contextlib.contextmanager
def redirected(trainer: Trainer, directory: Path) -> Iterator[dict[str, State]]:
    """Let Trainer save to another directory. What it passes to torch DCP is recorded, not written.

    Yields a dict {folder: state dict} that is filled while Trainer saves. Its tensors share memory
    with the parameters, the buffers and the optimizer. At the end, raises a CheckpointError if the
    state is sharded but Trainer has passed nothing to torch DCP's `save`.
    """
    parts: dict[str, State] = {}

    # Accelerate calls this for `pytorch_model_fsdp_0`, and again for `optimizer_0`.
    def record(state_dict: State, *, storage_writer: dcp.FileSystemWriter, **_: object) -> None:
        parts[Path(storage_writer.checkpoint_id).name] = state_dict

    plugin = trainer.accelerator.state.fsdp_plugin
    is_sharded = plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    offloading: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if is_sharded:  # otherwise this thread would copy the state now
        offloading = mock.patch.object(plugin.state_dict_config, "offload_to_cpu", False)
    with (
        mock.patch.object(trainer, GET_OUTPUT_DIR, lambda trial: str(directory)),
        # The push follows when the checkpoint is complete.
        mock.patch.object(trainer, PUSH_CHECKPOINT, lambda folder: None),
        mock.patch.object(dcp, "save", record),
        offloading,
    ):
        yield parts
    if is_sharded and not parts:
        raise CheckpointError(
            "Accelerate passed nothing to torch.distributed.checkpoint.save, so nothing can be "
            "saved in the background. Install a tested version of accelerate, or remove "
            "ShardedCheckpointCallback."
        )
