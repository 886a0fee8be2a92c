"""Collects the sharded state of a model and its optimizer, in the layout that Trainer resumes from."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import fsdp1
from hf_fsdp_recipes.configs.optimizers import optimizer_errors, optimizer_name
from hf_fsdp_recipes.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments


def check_arguments(args: "TrainingArguments", plugin: "FullyShardedDataParallelPlugin") -> None:
    """Raise a CheckpointError if a run with these settings cannot save complete, sharded checkpoints. Not a collective."""
    if plugin.state_dict_type.name != "SHARDED_STATE_DICT":
        raise CheckpointError(
            f"fsdp_state_dict_type is {plugin.state_dict_type.name}, but ShardedCheckpointCallback writes "
            f"SHARDED_STATE_DICT. Change it in the Accelerate config."
        )
    if args.save_only_model:
        raise CheckpointError(
            "save_only_model is set, but a checkpoint without an optimizer cannot be resumed. Remove save_only_model."
        )
    if errors := optimizer_errors(optimizer_name(args), plugin.fsdp_version):
        raise CheckpointError(*errors)


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plugin: "FullyShardedDataParallelPlugin"
) -> dict[str, dict[str, Any]]:
    """Return {"model": ..., "optimizer": ...} as sharded tensors that share memory with the parameters and the optimizer.

    Collective: every rank must call this. For a LoRA model, only the adapters are returned. Under FSDP1, the state is a copy.
    """
    from accelerate.utils import fsdp_utils
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if plugin.fsdp_version == 1:
        return fsdp1.capture(model, optimizer, plugin)
    # Accelerate's options would copy everything to the host now, on this thread.
    options = replace(fsdp_utils._prepare_sd_options(plugin), cpu_offload=False)
    model_state = fsdp_utils._get_model_state_dict(model, adapter_only=True, sd_options=options)
    # Clone buffers, which are plain tensors, because forward may change them before they are copied to the host.
    model_state = {name: value.clone() if type(value) is torch.Tensor else value for name, value in model_state.items()}
    return {"model": model_state, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


def local_tensors(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the local values of each tensor in a state: this rank's shard, or all of an unsharded tensor."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from local_tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from local_tensors(inner, f"{name}.{number}")
    elif hasattr(value, "local_shards"):  # FSDP1's ShardedTensor
        yield from ((name, shard.tensor) for shard in value.local_shards())
    elif isinstance(value, torch.Tensor):
        yield name, value.to_local() if hasattr(value, "to_local") else value


def random_state() -> dict[str, object]:
    """Return this rank's random state in the form that Trainer restores."""
    import numpy
    from accelerate import PartialState

    states: dict[str, object] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and PartialState().device.type == "cpu":
        # Trainer expects an entry for the accelerator, but reading its random state would create a context on every device.
        states[accelerator.type] = []
    elif accelerator is not None:
        module = torch.get_device_module(accelerator)
        has_several_ranks = distributed.world_size() > 1
        states[accelerator.type] = module.get_rng_state_all() if has_several_ranks else module.get_rng_state()
    return states
