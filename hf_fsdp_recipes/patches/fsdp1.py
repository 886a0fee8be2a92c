"""Patches for FSDP1, in any upstream package."""

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.constants import OPTIMIZER_NAME

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.parameter_names import is_adapter, without_wrappers
from hf_fsdp_recipes.patches.accelerate import find_heads, is_size_based
from hf_fsdp_recipes.patches.registry import Original, Patch

if TYPE_CHECKING:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
    from torch.distributed.checkpoint.state_dict import StateDictOptions

_patch = functools.partial(Patch, upstream="not filed; FSDP1 is in maintenance mode")

# FSDP1 on CPU ranks.


@_patch(
    "torch.distributed.fsdp._init_utils._get_compute_device(module, ignored_params, device_from_device_id)",
    feature="cpu ranks",
    changes="CPU ranks compute on `cpu`, not on `cpu:0`.",
    reason="FSDP1 treats `cpu` and `cpu:0` as different devices, so it would raise an error.",
)
def _compute_on_cpu(
    original: Original,
    module: torch.nn.Module,
    ignored_params: set[torch.nn.Parameter],
    device_from_device_id: torch.device | None,
    *args: Any,
) -> torch.device:
    if device_from_device_id is not None and device_from_device_id.type == "cpu":
        return torch.device("cpu")
    device = original(module, ignored_params, device_from_device_id, *args)
    return torch.device("cpu") if device.type == "cpu" else device


@_patch(
    "torch.distributed.fsdp._init_utils._init_intra_and_inter_node_groups(global_process_group, num_devices_per_node)",
    feature="cpu ranks",
    changes="With gloo, hybrid sharding shards over the ranks of a node.",
    reason="torch counts one CPU device per node, so it would treat every rank as a separate node.",
)
def _group_by_local_ranks(
    original: Original, global_process_group: "ProcessGroup", num_devices_per_node: int
) -> "tuple[ProcessGroup, ProcessGroup]":
    if torch.distributed.get_backend(global_process_group) == "gloo":
        num_devices_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_devices_per_node))
    return original(global_process_group, num_devices_per_node)


# Size-based wrapping.


@_patch(
    "accelerate.utils.dataclasses.FullyShardedDataParallelPlugin.set_auto_wrap_policy(self, model)",
    feature="size wrap",
    changes="SIZE_BASED_WRAP keeps the output head in the root unit.",
    reason="TRL uses the head's weight without calling the head, so FSDP1 would never gather the head if it were a separate unit.",
    depends_on=("trl",),
)
def _set_policy_without_heads(
    original: Original, self: "FullyShardedDataParallelPlugin", model: torch.nn.Module
) -> None:
    was_size_based = is_size_based(self.auto_wrap_policy)
    original(self, model)
    policy = self.auto_wrap_policy
    if was_size_based and self.fsdp_version == 1 and policy is not None:
        heads = find_heads(model)
        # An FSDP1 policy decides both whether to recurse into a module and whether to wrap it.
        self.auto_wrap_policy = lambda module, **rest: (
            all(module is not head for head in heads) and policy(module=module, **rest)
        )


# Checkpoints.


@_patch(
    "accelerate.utils.fsdp_utils._get_model_state_dict(model, adapter_only, sd_options)",
    feature="checkpointing",
    changes="The adapter-only state dict of a PEFT model under FSDP1 contains the adapter.",
    reason="PEFT looks up adapters by module name, and FSDP1 adds wrapper names to these, so no tensor would be saved.",
    depends_on=("peft",),
)
def _get_state_with_adapters(
    original: Original, model: torch.nn.Module, adapter_only: bool = False, sd_options: "StateDictOptions | None" = None
) -> "STATE_DICT_TYPE":
    if adapter_only and sd_options is None and _is_fsdp1_peft(model):
        return {name: tensor for name, tensor in model.state_dict().items() if is_adapter(name)}
    return original(model, adapter_only=adapter_only, sd_options=sd_options)


@_patch(
    "accelerate.utils.fsdp_utils._set_model_state_dict(model, state_dict, adapter_only, sd_options)",
    feature="checkpointing",
    changes="An adapter-only state dict is loaded into a PEFT model under FSDP1.",
    reason="PEFT looks up adapters by module name, and FSDP1 adds wrapper names to these, so no tensor would be loaded: a resumed "
    "run would silently start with new adapters.",
    depends_on=("peft",),
)
def _set_state_with_adapters(
    original: Original,
    model: torch.nn.Module,
    state_dict: "STATE_DICT_TYPE",
    adapter_only: bool = False,
    sd_options: "StateDictOptions | None" = None,
) -> object:
    if adapter_only and sd_options is None and _is_fsdp1_peft(model):
        # Hide FSDP1's warnings about the base weights, which an adapter-only state dict does not contain.
        logger = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            return model.load_state_dict(state_dict, strict=False)
        finally:
            logger.setLevel(level)
    return original(model, state_dict, adapter_only=adapter_only, sd_options=sd_options)


@_patch(
    "transformers.trainer.load_fsdp_optimizer(fsdp_plugin, accelerator, optimizer)",
    feature="checkpointing",
    changes="A parameter that has no optimizer state in the checkpoint has none after loading. Under FSDP1, the state of the "
    "other parameters is allocated before the checkpoint is loaded.",
    reason="torch asks the checkpoint for the state of every trained parameter, but a parameter that no row has used yet, for "
    "example in a vision tower, has no state, so loading fails. Under FSDP1 a new optimizer has no state, so nothing is loaded and "
    "Adam silently starts from zero.",
    depends_on=("torch",),
)
def _load_into_allocated_state(
    original: Original,
    fsdp_plugin: "FullyShardedDataParallelPlugin",
    accelerator: "Accelerator",
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    input_dir: str,
    *args: Any,
    **kwargs: Any,
) -> object:
    names = distributed.run_on_main(lambda: _read_names_with_state(Path(input_dir) / f"{OPTIMIZER_NAME}_0"))
    trained = {
        without_wrappers(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    new = [name for name in trained if names and name not in names]
    unused = [trained[name] for name in new] if len(new) < len(trained) else []
    if unused:
        distributed.print_main(
            f"resume: {len(unused)} trained parameters, such as {new[0]}, had no optimizer state yet and start without it"
        )
    for parameter in unused:  # frozen during the load, so that torch does not ask for their state
        optimizer.state.pop(parameter, None)
        parameter.requires_grad_(False)
    if fsdp_plugin.fsdp_version == 1:
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        _init_optim_state(getattr(optimizer, "optimizer", optimizer))
    try:
        return original(fsdp_plugin, accelerator, optimizer, model, input_dir, *args, **kwargs)
    finally:
        for parameter in unused:
            parameter.requires_grad_(True)


def _read_names_with_state(directory: Path) -> set[str]:
    """Return the names of the parameters whose optimizer state is in a DCP directory; an empty set for any other directory."""
    from torch.distributed.checkpoint import FileSystemReader

    if not (directory / ".metadata").is_file():
        return set()
    prefix = "optimizer.state."
    keys = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {key.removeprefix(prefix).rpartition(".")[0] for key in keys if key.startswith(prefix)}


@_patch(
    "torch.distributed.checkpoint.default_planner._flatten_sharded_tensors(state_dict)",
    feature="checkpointing",
    changes="A sharded tensor stays in the state dict of a rank whose shard is empty.",
    reason="DCP drops such a tensor and mistakes the checkpoint for one written by torch 2.3, so a run cannot resume if an "
    "adapter has fewer rows than there are ranks.",
)
def _keep_empty_shards(original: Original, state_dict: "STATE_DICT_TYPE") -> "STATE_DICT_TYPE":
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict

    flattened = original(state_dict)

    def keep(path: tuple[str | int, ...], value: object) -> None:
        if isinstance(value, ShardedTensor) and not value.local_shards():
            set_element(flattened, path, value)

    traverse_state_dict(state_dict, keep)
    return flattened


def _is_fsdp1_peft(model: torch.nn.Module) -> bool:
    from peft import PeftModel
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return isinstance(model, FSDP) and isinstance(model.module, PeftModel)
