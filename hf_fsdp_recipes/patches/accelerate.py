"""Patches for Accelerate: FSDP on CPU ranks, size-based wrapping, and models with parameters on meta.

Most patches of Accelerate for FSDP1 are in fsdp1.py.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.patches.registry import Original, Patch

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

LOADER_ATTRIBUTE = "_meta_model_loader"


class AttachedLoader(Protocol):
    """What `load_model` attaches to a model on meta."""

    def shard_fsdp2(self, accelerator: "Accelerator", model: torch.nn.Module, shard: Original) -> torch.nn.Module:
        """Shard the model with Accelerate's `shard(accelerator, model)`, and fill it from the checkpoint. Collective."""

    def prepare_fsdp1(
        self, accelerator: "Accelerator", model: torch.nn.Module, prepare: Callable[[], torch.nn.Module]
    ) -> torch.nn.Module:
        """Shard the model with `prepare`, and fill it. Collective."""

    def prepare_frozen(self, accelerator: "Accelerator", model: torch.nn.Module) -> torch.nn.Module:
        """Shard and fill a model that is not trained. Collective."""

    def fingerprint(self, model: torch.nn.Module) -> str:
        """Return a string that identifies the checkpoint."""


def find_meta_model_loader(model: torch.nn.Module) -> AttachedLoader | None:
    """Return the loader that `load_model` attached to a model on meta, even if the model is wrapped; None if there is none."""
    found = (module.__dict__.get(LOADER_ATTRIBUTE) for module in model.modules())
    return next((loader for loader in found if loader is not None), None)


# FSDP on CPU ranks.


@Patch(
    "accelerate.state.AcceleratorState.__init__(self, mixed_precision, cpu, dynamo_plugin, deepspeed_plugin, fsdp_plugin)",
    feature="cpu ranks",
    changes="CPU ranks with an FSDP plugin become FSDP ranks over gloo.",
    reason="Accelerate does not turn MULTI_CPU into FSDP, so the FSDP template is silently ignored.",
    upstream="to file: `accelerate launch --use_cpu` with an FSDP config trains as plain data parallel, without a warning",
)
def _turn_cpu_ranks_into_fsdp(original: Original, self: "AcceleratorState", *args: Any, **kwargs: Any) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    was_initialized, plugin = self._shared_state.get("_mixed_precision") is not None, kwargs.get("fsdp_plugin")
    original(self, *args, **kwargs)
    is_on_cpu = self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO)
    if was_initialized or plugin is None or not is_on_cpu:
        return
    if not torch.distributed.is_initialized():
        # Accelerate creates no process group for a single CPU rank, but FSDP needs one.
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if self._mixed_precision != "no":
        plugin.set_mixed_precision(self._mixed_precision)
    # Pinning needs an accelerator. FSDP1 always pins offloaded parameters, so turn FSDP1's offload off: on CPU ranks
    # the parameters are on the CPU anyway.
    if isinstance(plugin.cpu_offload, CPUOffload):
        plugin.cpu_offload = CPUOffload(offload_params=False)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    self.distributed_type = DistributedType.FSDP
    self.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


@Patch(
    "torch.distributed.fsdp.fully_shard(module, mesh)",
    feature="cpu ranks",
    changes="If Accelerate passes no mesh, FSDP2 shards over all CPU ranks.",
    reason="Accelerate passes a mesh only for hybrid sharding. torch's default mesh uses the machine's accelerator, which "
    "gloo ranks cannot use: 'No backend type associated with device type cuda'.",
    upstream="to file: `fully_shard` without a mesh ignores that the default process group is for CPU tensors",
    depends_on=("accelerate",),
)
def _shard_over_cpu_ranks(original: Original, module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    if kwargs.get("mesh") is None:
        world_size = torch.distributed.get_world_size()
        kwargs["mesh"] = torch.distributed.init_device_mesh("cpu", (world_size,))
    return original(module, *args, **kwargs)


@Patch(
    "accelerate.state.PartialState.wait_for_everyone(self)",
    feature="cpu ranks",
    changes="On CPU ranks, the barrier names no device.",
    reason="Accelerate passes `device_ids`, which torch reads as an index of the machine's accelerator, even with gloo.",
    upstream="to file: `wait_for_everyone` passes device_ids on CPU ranks and fails on a machine with an accelerator",
    depends_on=("torch",),
)
def _wait_on_cpu_ranks(original: Original, self: "PartialState") -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    else:
        original(self)


# Size-based wrapping.


@Patch(
    "accelerate.utils.fsdp_utils.fsdp2_prepare_auto_wrap_policy(fsdp2_plugin, model)",
    feature="size wrap",
    changes="SIZE_BASED_WRAP makes no separate units of module lists, the decoder, the output head, or parts of PEFT's adapters of "
    "experts.",
    reason="FSDP2 rejects module lists, which have no forward. Accelerate shards the final norm together with the head. The "
    "decoder contains this norm, so if the decoder were a unit, the norm would be sharded twice. TRL uses the head's weight "
    "without calling the head, so the head must stay in the root unit. PEFT's adapters of experts use the weights of their "
    "submodules without calling these, so the submodules must not be separate units.",
    upstream="to file: SIZE_BASED_WRAP with fsdp_version 2 fails on ModuleList and shards the final norm twice",
    depends_on=("trl",),
)
def _wrap_only_modules_that_run(
    original: Original, fsdp2_plugin: "FullyShardedDataParallelPlugin", model: torch.nn.Module
) -> Callable[[torch.nn.Module], bool] | None:
    from accelerate.utils import fsdp_utils

    policy = original(fsdp2_plugin, model)
    if policy is None or not is_size_based(fsdp2_plugin.auto_wrap_policy):
        return policy
    base = getattr(model, "get_base_model", lambda: model)()  # Accelerate finds no norm in a model with adapters
    kept_in_root = {*find_heads(model), fsdp_utils._find_final_norm(base)}
    has_no_forward = (torch.nn.ModuleList, torch.nn.ModuleDict)
    adapters = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    kept_whole = {inner for adapter in adapters for child in adapter.children() for inner in child.modules()}
    return lambda module: (
        not isinstance(module, has_no_forward)
        and module not in kept_whole
        and kept_in_root.isdisjoint(module.modules())
        and policy(module)
    )


def is_size_based(policy: object) -> bool:
    """Return whether a wrap policy is torch's size-based policy."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    return getattr(policy, "func", policy) is size_based_auto_wrap_policy


def find_heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model's output head and, if they share their weight, also its input embedding."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if head is None:
        return []
    is_tied = embedding is not None and getattr(embedding, "weight", None) is getattr(head, "weight", None)
    return [head, embedding] if is_tied else [head]


# Models on meta.


@Patch(
    "accelerate.accelerator.Accelerator._prepare_fsdp2(self)",
    feature="loading",
    changes="Parameters on meta get distinct `data_ptr` values.",
    reason="Accelerate uses `data_ptr` to replace the optimizer's parameters with their shards, but on meta every parameter's "
    "`data_ptr` is 0.",
    upstream="to file: `_prepare_fsdp2` maps optimizer parameters by data_ptr and mixes up parameters on meta",
)
def _prepare_with_distinct_pointers(original: Original, self: "Accelerator", *args: object) -> tuple[object, ...]:
    for model in args:
        if isinstance(model, torch.nn.Module) and find_meta_model_loader(model) is not None:
            for number, parameter in enumerate(model.parameters(), start=1):
                if parameter.is_meta:
                    parameter.data_ptr = functools.partial(int, -number)
    return original(self, *args)


@Patch(
    "accelerate.accelerator.fsdp2_prepare_model(accelerator, model)",
    feature="loading",
    changes="After a model from `load_model` is sharded, its shards are filled from the checkpoint.",
    reason="Accelerate fills meta parameters only from a full state dict, which needs a full copy of the model on rank 0.",
    upstream="to file: a hook between `fully_shard` and the first forward, to load sharded weights",
)
def _shard_then_fill(original: Original, accelerator: "Accelerator", model: torch.nn.Module) -> torch.nn.Module:
    loader = find_meta_model_loader(model)
    return original(accelerator, model) if loader is None else loader.shard_fsdp2(accelerator, model, original)


@Patch(
    "accelerate.accelerator.Accelerator.prepare_model(self, model, device_placement, evaluation_mode)",
    feature="loading",
    changes="Under FSDP1, a model from `load_model` is materialized one unit at a time. With `evaluation_mode`, it is sharded and "
    "filled, under FSDP1 and FSDP2.",
    reason="Under FSDP1, Accelerate keeps the full model in rank 0's memory and, while it synchronizes module states, in every "
    "rank's memory. With `evaluation_mode`, Accelerate does not shard the model at all, and its parameters stay on meta.",
    upstream="to file: `prepare_model(evaluation_mode=True)` does not shard under FSDP",
)
def _prepare_on_meta(
    original: Original,
    self: "Accelerator",
    model: torch.nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> torch.nn.Module:
    plugin, loader = getattr(self.state, "fsdp_plugin", None), find_meta_model_loader(model)
    if loader is not None and plugin is not None:
        if evaluation_mode:
            return loader.prepare_frozen(self, model)
        if plugin.fsdp_version == 1:
            return loader.prepare_fsdp1(self, model, lambda: original(self, model, device_placement))
    return original(self, model, device_placement, evaluation_mode)


@Patch(
    "accelerate.accelerator.Accelerator.prepare_optimizer(self, optimizer, device_placement)",
    feature="loading",
    changes="Under FSDP1, an optimizer whose parameters are on meta is refused: it was created before the model was sharded.",
    reason="FSDP1 replaces the parameters, so the optimizer would update none of the new ones.",
    upstream="to file: an optimizer of parameters on meta is accepted under FSDP1 and trains nothing",
)
def _prepare_unless_on_meta(
    original: Original, self: "Accelerator", optimizer: torch.optim.Optimizer, device_placement: bool | None = None
) -> "AcceleratedOptimizer":
    is_on_meta = any(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"])
    if is_on_meta and getattr(getattr(self.state, "fsdp_plugin", None), "fsdp_version", None) == 1:
        raise LoadError(
            "the optimizer was created before FSDP1 sharded the model, so it would train nothing. Call "
            "accelerator.prepare(model) before you create the optimizer, or use an fsdp2_*.yaml template."
        )
    return original(self, optimizer, device_placement)
