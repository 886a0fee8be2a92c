"""The four upstream functions that this package replaces. Importing the package replaces none.

A replacement acts only on models from `load_model`, on trainers with a `ShardedCheckpointCallback`,
or on CPU ranks launched with FSDP. Everything else works as before. Applying a patch checks that
the upstream function has the expected parameters.
"""

import functools
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    parse_flag_from_env,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.upstream.torch_internals import check_saving
from hf_fsdp_recipes.upstream.transformers_internals import check_trainer
from hf_fsdp_recipes.upstream.versions import patch_error

# The attribute of a model that holds its `Loader` until the weights are loaded.
LOADER = "_hf_fsdp_loader"
# The attribute of a replacement that holds the original function.
MARK = "_hf_fsdp_recipes_original"
# What Accelerate calls the training on CPU ranks.
WITHOUT_FSDP = (DistributedType.MULTI_CPU, DistributedType.NO)
# Environment variables that hide the machine's accelerators from CPU ranks. A runtime reads its
# variable on first use.
HIDDEN_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Patch:
    """An upstream function that this package replaces."""

    module: str  # module in which callers look up the function, such as `accelerate.accelerator`
    name: str  # the function's name in this module, or `Class.method`
    parameters: tuple[str, ...]  # names of the function's first parameters
    remains: str  # what still works if the patch cannot be applied

    def apply(self, replacement: Callable) -> None:
        """Replace the function with a call of `replacement(original, ...)`. Idempotent.

        Raises:
            PatchError: upstream has moved the function or has changed its parameters.
        """
        classes, _, attribute = self.name.rpartition(".")
        try:
            holder = pkgutil.resolve_name(f"{self.module}:{classes}")
            original = getattr(holder, attribute)
            found = tuple(inspect.signature(original).parameters)[: len(self.parameters)]
            if found != self.parameters:
                raise AttributeError(f"{self.name} has the parameters {', '.join(found)}")
        except (ImportError, AttributeError) as error:
            raise patch_error(
                self.module,
                f"{error}, so this package cannot replace "
                f"{self.module}.{self.name}({', '.join(self.parameters)})",
                self.remains,
            ) from error
        if hasattr(original, MARK):
            return

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(replaced, MARK, original)
        setattr(holder, attribute, replaced)


# Accelerate fills meta parameters only from a full state dict, which needs a full copy of the model
# on rank 0. Proposal for upstream: a hook that loads sharded weights between `fully_shard` and the
# first forward.
FILL_SHARDS = Patch(
    "accelerate.accelerator",
    "fsdp2_prepare_model",
    ("accelerator", "model"),
    "models of from_pretrained, saving and exporting work without it",
)


def _fill_shards(original: Callable, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    loader = find_loader(model)
    if loader is None:
        return original(accelerator, model)
    return loader.shard(accelerator, model, original)


# FSDP2 rejects module lists, because they have no forward. Accelerate shards the final norm with
# the output head, so the norm would be sharded twice if it were also in another unit. TRL uses the
# head's weight without calling the head. Upstream bug: SIZE_BASED_WRAP with fsdp_version 2 fails on
# ModuleList and shards the final norm twice.
WRAP_BY_SIZE = Patch(
    "accelerate.utils.fsdp_utils",
    "fsdp2_prepare_auto_wrap_policy",
    ("fsdp2_plugin", "model"),
    "TRANSFORMER_BASED_WRAP works without it",
)


def _wrap_by_size(
    original: Callable, fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Any:
    policy = original(fsdp2_plugin, model)
    wanted = fsdp2_plugin.auto_wrap_policy
    is_by_size = getattr(wanted, "func", wanted) is size_based_auto_wrap_policy
    if find_loader(model) is None or not is_by_size:
        return policy
    base: Any = getattr(model, "get_base_model", lambda: model)()
    in_root = {base.get_input_embeddings(), base.get_output_embeddings()}
    in_root |= {child for child in base.base_model.children() if "Norm" in type(child).__name__}
    # PEFT's adapters for experts use their inner modules' weights without calling these modules.
    kept_whole = {
        inner
        for adapter in model.modules()
        if type(adapter).__name__ == "ParamWrapper"
        for child in adapter.children()
        for inner in child.modules()
    }
    # Ranks may call different experts, so an expert, a module in a list in a list, is no unit.
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for outer in lists:
        for nested in set(lists) & set(outer.modules()) - {outer}:
            kept_whole.update(nested.modules())
    return lambda module: (
        not isinstance(module, nn.ModuleList | nn.ModuleDict)
        and module not in kept_whole
        and in_root.isdisjoint(module.modules())
        and policy(module)
    )


# Trainer offers no way to change how a checkpoint is written without also changing when it is
# written, and no event that surely comes after an error. Proposal for upstream: a strategy object
# for `Trainer._save_checkpoint`, and a context around the training loop.
TRAINING_LOOP = Patch(
    "transformers.trainer",
    "Trainer._inner_training_loop",
    ("self", "batch_size", "args", "resume_from_checkpoint", "trial"),
    "load_model and export_model work without it",
)


def _run_training_loop(
    original: Callable,
    self: Any,
    batch_size: Any = None,
    args: Any = None,
    resume_from_checkpoint: Any = None,
    trial: Any = None,
    **kwargs: Any,
) -> Any:
    loop = functools.partial(
        original, self, batch_size, args, resume_from_checkpoint, trial, **kwargs
    )
    for callback in self.callback_handler.callbacks:
        # `train_with` of our callback is public only for this call.
        if hasattr(callback, "train_with"):
            return callback.train_with(self, loop, resume_from_checkpoint, trial)
    return loop()


# With an FSDP plugin, Accelerate turns MULTI_GPU into FSDP. For MULTI_CPU, it silently ignores the
# FSDP config. Upstream bug: with `use_cpu: true` and an FSDP config, `accelerate launch` silently
# trains with plain data parallelism.
CPU_RANKS = Patch(
    "accelerate.state",
    "AcceleratorState.__init__",
    ("self", "mixed_precision", "cpu", "dynamo_plugin", "deepspeed_plugin", "fsdp_plugin"),
    "FSDP on accelerators works without it",
)


def _turn_cpu_ranks_into_fsdp(
    original: Callable, self: AcceleratorState, *args: Any, **kwargs: Any
) -> None:
    was_initialized = self._shared_state.get("_mixed_precision") is not None
    plugin = kwargs.get("fsdp_plugin")
    original(self, *args, **kwargs)
    if was_initialized or plugin is None or self.distributed_type not in WITHOUT_FSDP:
        return
    # Accelerate starts no process group for a single CPU rank.
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    if self._mixed_precision != "no":
        plugin.set_mixed_precision(self._mixed_precision)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator
    self.distributed_type = DistributedType.FSDP
    self.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def find_loader(model: nn.Module) -> Any:
    """Return the `Loader` of a model, which may be wrapped. None: no weights are left to load."""
    loaders = [vars(module).get(LOADER) for module in model.modules()]
    return next(filter(None, loaders), None)


def apply_for_loading() -> None:
    """Let Accelerate fill models from `load_model`. Idempotent.

    If SIZE_BASED_WRAP is set, let it work for these models.
    """
    FILL_SHARDS.apply(_fill_shards)
    if os.getenv("FSDP_AUTO_WRAP_POLICY") == "SIZE_BASED_WRAP":
        WRAP_BY_SIZE.apply(_wrap_by_size)


def apply_for_saving() -> None:
    """Let a `ShardedCheckpointCallback` save its trainer's checkpoints. Idempotent."""
    TRAINING_LOOP.apply(_run_training_loop)
    check_trainer()
    check_saving()


def is_fsdp_requested() -> bool:
    """Return whether the launcher asks for FSDP."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def are_cpu_ranks_requested() -> bool:
    """Return whether the launcher asks for FSDP on CPU ranks.

    With an FSDP config, `accelerate launch` does not pass on `use_cpu: true`, so ACCELERATE_USE_CPU
    may be unset on CPU ranks. If it is unset, FSDP on a machine without an accelerator counts as
    FSDP on CPU ranks.
    """
    if not is_fsdp_requested():
        return False
    if "ACCELERATE_USE_CPU" in os.environ:
        return parse_flag_from_env("ACCELERATE_USE_CPU")
    return not torch.accelerator.is_available()


def enable_cpu_ranks() -> None:
    """Run FSDP over gloo if the launcher asks for FSDP on CPU ranks. Otherwise do nothing.

    Idempotent. Call this on every rank before the first Accelerator is created. It hides the
    machine's accelerators from the process.

    Raises:
        RecipeError: an Accelerator without FSDP already exists.
    """
    if not are_cpu_ranks_requested():
        return
    if os.getenv("RANK", "0") == "0" and "ACCELERATE_USE_CPU" not in os.environ:
        print("note: no accelerator was found, so FSDP trains on CPU ranks", flush=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ.update(dict.fromkeys(HIDDEN_DEVICES, ""))
    # Otherwise each rank warns about missing GPU kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    CPU_RANKS.apply(_turn_cpu_ranks_into_fsdp)
    if AcceleratorState._shared_state.get("distributed_type") in WITHOUT_FSDP:
        raise RecipeError(
            "an Accelerator was created before FSDP could be turned on for CPU ranks. Call "
            "load_model or ShardedCheckpointCallback before the first Accelerator or Trainer."
        )
    # TrainingArguments that were created without ACCELERATE_USE_CPU have set up Accelerate's state
    # for a single process.
    if PartialState._shared_state.get("distributed_type") == DistributedType.NO:
        PartialState._reset_state()
        PartialState(cpu=True)
