"""Lets Trainer and Accelerate save as usual, but records the sharded state that torch DCP would otherwise write."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed.checkpoint as dcp

from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.upstream.transformers_internals import GET_OUTPUT_DIR, PUSH_CHECKPOINT

State = Mapping[str, Any]


@contextlib.contextmanager
def redirected(trainer: Any, directory: Path) -> Iterator[dict[str, State]]:
    """Let Trainer save to another directory. The state that it passes to torch DCP is recorded and not written.

    Yields a dict {folder: state dict} that is filled while Trainer saves. Its tensors share memory with the parameters, the
    buffers and the optimizer. At the end, raises a CheckpointError if the state is sharded but Trainer has passed nothing to
    torch DCP's `save`.
    """
    parts: dict[str, State] = {}

    def record(state_dict: State, *, storage_writer: dcp.FileSystemWriter, **kwargs: Any) -> None:
        parts[Path(storage_writer.checkpoint_id).name] = state_dict

    plugin = trainer.accelerator.state.fsdp_plugin
    is_sharded = plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    with contextlib.ExitStack() as stack:

        def swap(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        swap(trainer, GET_OUTPUT_DIR, lambda trial: str(directory))
        # The push follows when the checkpoint is complete.
        swap(trainer, PUSH_CHECKPOINT, lambda folder: None)
        swap(dcp, "save", record)
        if is_sharded:
            swap(
                plugin.state_dict_config, "offload_to_cpu", False
            )  # otherwise this thread would copy the state now
        yield parts
    if is_sharded and not parts:
        raise CheckpointError(
            "Accelerate passed nothing to torch.distributed.checkpoint.save, so nothing can be saved in the background. "
            "Install a tested version of accelerate, or remove ShardedCheckpointCallback."
        )
