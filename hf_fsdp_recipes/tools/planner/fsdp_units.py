"""Splits a model into FSDP units with Accelerate's and torch's own wrapping policies."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from accelerate.utils.other import get_module_children_bottom_up
from torch.distributed.fsdp.wrap import _recursive_wrap

from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.patches import registry
from hf_fsdp_recipes.tools.planner.meta_model import MetaModel, Parameter, list_parameters
from hf_fsdp_recipes.tools.planner.training_job import TrainingJob

ROOT = ""
# The modules of a unit, and whether the unit is freed after forward.
ModuleGroup = tuple[list[torch.nn.Module], bool]


@dataclass(frozen=True, eq=False)
class FsdpUnit:
    """Parameters that are gathered, freed and reduced together (torch: an FSDP parameter group)."""

    # Names of the modules that use the parameters ("" is the root). The first module to run gathers the parameters,
    # and the last module frees them.
    modules: tuple[str, ...]
    parameters: tuple[Parameter, ...]  # without the parameters of nested units
    reshards_after_forward: bool  # whether the parameters are freed after forward

    @property
    def name(self) -> str:
        """The names of the modules, for tables."""
        return " + ".join(self.modules) if self.modules != (ROOT,) else "root"

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that have gradients."""
        return tuple(parameter for parameter in self.parameters if parameter.requires_grad)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the gathered parameters, with padding."""
        return round(sum(p.num_padded_elements * p.unsharded_item_bytes for p in self.parameters))

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard of the parameters; of the largest shard if the shards differ."""
        return round(sum(p.num_shard_elements * p.sharded_item_bytes for p in self.parameters))

    @property
    def unsharded_gradient_bytes(self) -> int:
        """Bytes of the gradients that backward computes on each rank."""
        return round(sum(p.num_elements * p.unsharded_item_bytes for p in self.trained))

    @property
    def shard_gradient_bytes(self) -> int:
        """Bytes of one rank's shard of the reduced gradients, in the dtype of the parameters' shards."""
        return round(sum(p.num_shard_elements * p.sharded_item_bytes for p in self.trained))


def find_units(model: MetaModel, job: TrainingJob) -> list[FsdpUnit]:
    """Split a model into units as FSDP does, the root last; raise PlanError if no layer has the class to wrap."""
    return build_units((_group_fsdp2 if job.strategy.version == 2 else _group_fsdp1)(model, job), model, job)


def build_units(groups: list[ModuleGroup], model: MetaModel, job: TrainingJob) -> list[FsdpUnit]:
    """Make one FSDP unit from each group of modules. Every parameter belongs to the first group that contains it."""
    names = {id(module): name for name, module in model.named_modules()}
    unassigned = dict(zip(map(id, model.parameters()), list_parameters(model, job), strict=True))
    units = []
    for modules, reshards in groups:
        tensors = (id(tensor) for module in modules for tensor in module.parameters())
        parameters = tuple(unassigned.pop(tensor) for tensor in tensors if tensor in unassigned)
        units.append(FsdpUnit(tuple(names[id(module)] for module in modules), parameters, reshards))
    return [unit for unit in units if unit.parameters or unit.modules == (ROOT,)]


def _group_fsdp2(model: MetaModel, job: TrainingJob) -> list[ModuleGroup]:
    """Group modules into units as Accelerate does for FSDP2.

    There is one group for each module that the policy wraps, one for the input embedding, one for the final norm and the head
    together, and one for the root. A tied embedding is in the group of the norm and the head.

    Source: accelerate 1.15 `utils/fsdp_utils.py`, `fsdp2_prepare_model`.
    """
    reshards = job.strategy.reshards_after_forward
    policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy(_make_plugin(model, job), model)
    wrapped = [module for module in get_module_children_bottom_up(model)[:-1] if policy is not None and policy(module)]
    wrapped_ids = {id(module) for module in wrapped}
    groups: list[ModuleGroup] = [([module], reshards) for module in wrapped]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding is not None and head is not None and embedding.weight is head.weight
    if not is_tied and embedding is not None and id(embedding) not in wrapped_ids:
        groups.append(([embedding], reshards))
    norm = fsdp_utils._find_final_norm(model)
    tail = [norm, embedding, head] if is_tied else [norm, head]
    tail = [module for module in tail if module is not None and id(module) not in wrapped_ids]
    return [*groups, *([(tail, False)] if tail else []), ([model], False)]


def _group_fsdp1(model: MetaModel, job: TrainingJob) -> list[ModuleGroup]:
    policy = _make_plugin(model, job).auto_wrap_policy
    if job.lora_rank:
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(model)  # as Trainer does for adapters under FSDP1
    return group_by_policy(model, policy, job.strategy.reshards_after_forward)


def group_by_policy(model: torch.nn.Module, policy: object, reshards_after_forward: bool) -> list[ModuleGroup]:
    """Group modules into units as torch's FSDP1 does for a wrapping policy. The root stays gathered after forward.

    Source: torch 2.13 `distributed/fsdp/wrap.py`, `_recursive_wrap`.
    """
    wrapped: list[torch.nn.Module] = []

    def record(module: torch.nn.Module) -> torch.nn.Module:
        wrapped.append(module)
        return module

    if policy is not None:
        _recursive_wrap(model, policy, record, set(), set(), only_wrap_children=True)
    return [*(([module], reshards_after_forward) for module in wrapped), ([model], False)]


def _make_plugin(model: MetaModel, job: TrainingJob) -> FullyShardedDataParallelPlugin:
    """Make the plugin that Accelerate would make from the template, with its wrapping policy set for this model."""
    strategy = job.strategy
    registry.apply("size wrap")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=strategy.version,
        auto_wrap_policy="transformer_based_wrap" if strategy.min_num_params is None else "size_based_wrap",
        transformer_cls_names_to_wrap=strategy.wrap_class.split(",") if strategy.wrap_class else None,
        min_num_params=strategy.min_num_params,
        reshard_after_forward=strategy.version == 2 or "full_shard",
        sync_module_states=False if strategy.version == 1 else None,
        cpu_ram_efficient_loading=False,
    )
    try:
        plugin.set_auto_wrap_policy(model)
    except ValueError as error:
        raise PlanError(
            f"{strategy.name}: {error} Remove fsdp_transformer_layer_cls_to_wrap to wrap the layers that the model declares."
        ) from error
    return plugin


def module_names(units: Iterable[FsdpUnit]) -> list[str]:
    """Return the names of the modules whose forward and backward gather or free a unit, outer modules first."""
    names = {name for unit in units for name in unit.modules if name != ROOT}
    return sorted(names, key=lambda name: (name.count("."), name))


def find_last_layer(model: torch.nn.Module) -> str | None:
    """Return the name of the last decoder layer: the last item of the longest `ModuleList`."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        return None
    name, longest = max(lists, key=lambda item: (len(item[1]), -item[0].count(".")))
    return f"{name}.{len(longest) - 1}"
