"""The four upstream functions that this package replaces. Importing the package replaces none of them.

A replacement acts only on models from `load_model`, on trainers with a `ShardedCheckpointCallback`, or on CPU ranks launched
with FSDP. Everything else works as before. Applying a patch checks that the upstream function has the expected parameters.
"""

import functools
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    parse_flag_from_env,
    str_to_bool,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from hf_fsdp_recipes.errors import PatchError, RecipeError

Function = Callable[..., Any]

LOADER = (
    "_hf_fsdp_loader"  # attribute that holds the `Loader` of a model until the weights are loaded
)
MARK = "_hf_fsdp_recipes_original"  # attribute of a replacement that holds the original function

# Environment variables that hide the machine's accelerators from CPU ranks. A runtime reads its variable on first use.
HIDDEN_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Patch:
    """An upstream function that this package replaces."""

    module: str  # module in which callers look up the function, such as `accelerate.accelerator`
    name: str  # the function's name in this module, or `Class.method`
    parameters: tuple[str, ...]  # names of the function's first parameters
    tested: str  # upstream versions with which the patch is tested
    remains: str  # what still works if the patch cannot be applied

    def apply(self, replacement: Function) -> None:
        """Replace the function with a call of `replacement(original, ...)`. Idempotent.

        Raises:
            PatchError: upstream has moved the function or has changed its parameters.
        """
        classes, _, attribute = self.name.rpartition(".")
        try:
            holder = pkgutil.resolve_name(f"{self.module}:{classes}")
        except (ImportError, AttributeError) as error:
            raise self._error(str(error)) from error
        original = getattr(holder, attribute, None)
        if hasattr(original, MARK):
            return
        if original is None:
            raise self._error(f"{self.module} has no {self.name}")
        found = tuple(inspect.signature(original).parameters)[: len(self.parameters)]
        if found != self.parameters:
            raise self._error(f"{self.module}.{self.name} has the parameters {', '.join(found)}")

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(replaced, MARK, original)
        setattr(holder, attribute, replaced)

    def _error(self, found: str) -> PatchError:
        package = self.module.partition(".")[0]
        return PatchError(
            f"{found}, so this package cannot replace {self.module}.{self.name}({', '.join(self.parameters)}): {package} "
            f"{version(package)} is installed, {self.tested} is tested. Install a tested version; {self.remains}."
        )


# Accelerate fills meta parameters only from a full state dict, which needs a full copy of the model on rank 0.
# Proposal for upstream: a hook that loads sharded weights between `fully_shard` and the first forward.
FILL_SHARDS = Patch(
    "accelerate.accelerator",
    "fsdp2_prepare_model",
    ("accelerator", "model"),
    "1.13 to 1.15",
    "models of from_pretrained, saving and exporting work without it",
)


def _fill_shards(
    original: Function, accelerator: Accelerator, model: torch.nn.Module
) -> torch.nn.Module:
    loader = find_loader(model)
    return (
        original(accelerator, model)
        if loader is None
        else loader.shard(accelerator, model, original)
    )


# FSDP2 rejects module lists, because they have no forward. Accelerate shards the final norm together with the output head, so
# the norm would be sharded twice if it were also in another unit. TRL uses the head's weight without calling the head.
# Upstream bug: SIZE_BASED_WRAP with fsdp_version 2 fails on ModuleList and shards the final norm twice.
WRAP_BY_SIZE = Patch(
    "accelerate.utils.fsdp_utils",
    "fsdp2_prepare_auto_wrap_policy",
    ("fsdp2_plugin", "model"),
    "1.13 to 1.15",
    "TRANSFORMER_BASED_WRAP works without it",
)


def _wrap_by_size(
    original: Function, fsdp2_plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module
) -> Any:
    policy = original(fsdp2_plugin, model)
    wanted = fsdp2_plugin.auto_wrap_policy
    if (
        find_loader(model) is None
        or getattr(wanted, "func", wanted) is not size_based_auto_wrap_policy
    ):
        return policy
    base = getattr(model, "get_base_model", lambda: model)()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    norms = [child for child in base.base_model.children() if "Norm" in type(child).__name__]
    in_root = {module for module in (*ends, *norms) if module is not None}
    # PEFT's adapters for experts use the weights of their inner modules without calling these modules.
    adapters = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    kept_whole = {
        inner for adapter in adapters for child in adapter.children() for inner in child.modules()
    }
    return lambda module: (
        not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        and module not in kept_whole
        and in_root.isdisjoint(module.modules())
        and policy(module)
    )


# Trainer offers no way to change how a checkpoint is written without also changing when it is written.
# Proposal for upstream: a strategy object for `Trainer._save_checkpoint`, or a callback event around this method.
SAVE_CHECKPOINT = Patch(
    "transformers.trainer",
    "Trainer._save_checkpoint",
    ("self", "model", "trial"),
    "5.14 to 5.24",
    "load_model and export_model work without it",
)


def _save_checkpoint(original: Function, self: Any, model: torch.nn.Module, trial: Any) -> None:
    # The callback's `save` is public only for this call. It replaces `original` only while a run under FSDP trains.
    found = [
        one for one in self.callback_handler.callbacks if getattr(one, "saves_checkpoints", False)
    ]
    if found:
        found[0].save(self, functools.partial(original, self, model, trial), trial)
    else:
        original(self, model, trial)


# With an FSDP plugin, Accelerate turns MULTI_GPU into FSDP. For MULTI_CPU, it silently ignores the FSDP config.
# Upstream bug: with `use_cpu: true` and an FSDP config, `accelerate launch` silently trains with plain data parallelism.
CPU_RANKS = Patch(
    "accelerate.state",
    "AcceleratorState.__init__",
    ("self", "mixed_precision", "cpu", "dynamo_plugin", "deepspeed_plugin", "fsdp_plugin"),
    "1.13 to 1.15",
    "FSDP on accelerators works without it",
)


def _turn_cpu_ranks_into_fsdp(
    original: Function, self: AcceleratorState, *args: Any, **kwargs: Any
) -> None:
    was_initialized, plugin = (
        self._shared_state.get("_mixed_precision") is not None,
        kwargs.get("fsdp_plugin"),
    )
    original(self, *args, **kwargs)
    is_on_cpu = self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO)
    if was_initialized or plugin is None or not is_on_cpu:
        return
    if (
        not torch.distributed.is_initialized()
    ):  # Accelerate starts no process group for a single CPU rank
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    if self._mixed_precision != "no":
        plugin.set_mixed_precision(self._mixed_precision)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(
            pin_memory=False
        )  # pinning memory needs an accelerator
    self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def find_loader(model: torch.nn.Module) -> Any:
    """Return the `Loader` of a model, which may be wrapped. Return None if the model has no weights left to load."""
    return next(
        (module.__dict__[LOADER] for module in model.modules() if LOADER in module.__dict__), None
    )


def apply_for_loading() -> None:
    """Let Accelerate fill models from `load_model`. If SIZE_BASED_WRAP is set, let it work for these models. Idempotent."""
    FILL_SHARDS.apply(_fill_shards)
    if os.environ.get("FSDP_AUTO_WRAP_POLICY") == "SIZE_BASED_WRAP":
        WRAP_BY_SIZE.apply(_wrap_by_size)


def apply_for_saving() -> None:
    """Let a `ShardedCheckpointCallback` save its trainer's checkpoints. Idempotent."""
    SAVE_CHECKPOINT.apply(_save_checkpoint)


def is_fsdp_requested() -> bool:
    """Return whether the launcher asks for FSDP."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def are_cpu_ranks_requested() -> bool:
    """Return whether the launcher asks for FSDP on CPU ranks.

    With an FSDP config, `accelerate launch` does not pass on `use_cpu: true`, so ACCELERATE_USE_CPU may be unset on CPU ranks.
    If it is unset, FSDP on a machine without an accelerator counts as FSDP on CPU ranks.
    """
    flag = os.environ.get("ACCELERATE_USE_CPU")
    return is_fsdp_requested() and (
        not torch.accelerator.is_available() if flag is None else bool(str_to_bool(flag))
    )


def enable_cpu_ranks() -> None:
    """Run FSDP over gloo if the launcher asks for FSDP on CPU ranks. Otherwise do nothing. Idempotent.

    Call this on every rank before the first Accelerator is created. It hides the machine's accelerators from the process.

    Raises:
        RecipeError: an Accelerator without FSDP already exists.
    """
    if not are_cpu_ranks_requested():
        return
    if os.environ.get("RANK", "0") == "0" and "ACCELERATE_USE_CPU" not in os.environ:
        print("note: no accelerator was found, so FSDP trains on CPU ranks", flush=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ.update(dict.fromkeys(HIDDEN_DEVICES, ""))
    logging.getLogger("bitsandbytes").setLevel(
        logging.ERROR
    )  # otherwise each rank warns about missing GPU kernels
    CPU_RANKS.apply(_turn_cpu_ranks_into_fsdp)
    if AcceleratorState._shared_state.get("distributed_type") in (
        DistributedType.MULTI_CPU,
        DistributedType.NO,
    ):
        raise RecipeError(
            "an Accelerator was created before FSDP could be turned on for CPU ranks. Call load_model or "
            "ShardedCheckpointCallback before the first Accelerator or Trainer."
        )
    # TrainingArguments that were created without ACCELERATE_USE_CPU have set up Accelerate's state for a single process.
    if PartialState._shared_state.get("distributed_type") == DistributedType.NO:
        PartialState._reset_state()
        PartialState(cpu=True)
