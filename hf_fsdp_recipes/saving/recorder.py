"""Lets Trainer and Accelerate save as usual, but records the sharded state meant for torch DCP."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import Trainer

from hf_fsdp_recipes.training.sharded_optimizer import to_sharded
from hf_fsdp_recipes.upstream.torch_internals import checkpoint_name
from hf_fsdp_recipes.upstream.transformers_internals import GET_OUTPUT_DIR, PUSH_CHECKPOINT
from hf_fsdp_recipes.weights.rows import local_part


@contextlib.contextmanager
def redirected(trainer: Trainer, directory: Path) -> Iterator[dict[str, Any]]:
    """Let Trainer save to another directory. What it passes to torch DCP is recorded, not written.

    Yields a dict {folder: state dict} that is filled while Trainer saves. It stays empty if the
    state is not sharded. Its tensors share memory with the parameters, the buffers and the
    optimizer.
    """
    parts: dict[str, Any] = {}

    save = dcp.save

    # Accelerate calls this for `pytorch_model_fsdp_0`, and again for `optimizer_0`.
    def record(state_dict: dict[str, Any], **kwargs: Any) -> Any:
        folder = Path(getattr(kwargs.get("storage_writer"), "checkpoint_id", ""))
        if not folder.is_relative_to(directory):  # a trainer of another class saves more
            return save(state_dict, **kwargs)
        parts[folder.name] = state_dict

    replace = mock.patch.object
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(replace(trainer, GET_OUTPUT_DIR, lambda trial: str(directory)))
        # The push follows when the checkpoint is complete.
        replaced.enter_context(replace(trainer, PUSH_CHECKPOINT, lambda folder: None))
        if is_sharded(trainer):
            replaced.enter_context(replace(dcp, "save", record))
            # If it offloaded sharded state, this thread would copy the state now.
            config = trainer.accelerator.state.fsdp_plugin.state_dict_config
            replaced.enter_context(replace(config, "offload_to_cpu", False))
        yield parts
    for state in parts.values():
        if "optimizer" in state:
            add_unused_weights(state["optimizer"], trainer.model)


def is_sharded(trainer: Trainer) -> bool:
    """Return whether Trainer saves a state that is sharded by FSDP."""
    if not trainer.is_fsdp_enabled:
        return False
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    return plugin.state_dict_type.name == "SHARDED_STATE_DICT"


def add_unused_weights(optimizer: Any, model: Any) -> None:
    """Add the state of trained weights that never had a gradient to an optimizer's state dict.

    Such weights are those of a vision tower that is trained on text. Their state is zero, and takes
    no memory. Without it, torch refuses to resume.
    """
    parameters = {checkpoint_name(model, name): value for name, value in model.named_parameters()}
    states = optimizer["state"]
    for group in optimizer["param_groups"]:
        names = group["params"]
        example = next((name for name in [*names, *states] if name in states), None)
        for name in names:
            if example is not None and name not in states:
                states[name] = {
                    key: zero_state(value, parameters[example], parameters[name])
                    for key, value in states[example].items()
                }


def zero_state(value: Any, of: Tensor, parameter: Tensor) -> Any:
    """Return zeros for a weight, like a `value` in the state `of` another weight."""
    if not isinstance(value, Tensor):
        return type(value)()
    if value.shape != of.shape:
        return torch.zeros_like(value)
    local = local_part(parameter)
    zeros = torch.zeros((), dtype=value.dtype, device=local.device).expand(local.shape)
    return to_sharded(zeros, parameter)
