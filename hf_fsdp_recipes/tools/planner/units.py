"""The units that FSDP gathers at once: found by the very policies that Accelerate and torch wrap with.

Does not shard anything: policies are asked about a model on meta, and what they pick is noted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.patches import registry
from hf_fsdp_recipes.tools.planner.job import Job
from hf_fsdp_recipes.tools.planner.meta_model import Weight, weights

ROOT = ""


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        modules: whose forward needs them; the first to run gathers, the last one to end frees. The root is "".
        weights: its parameters, without those of units inside it.
        reshards: whether it is freed after forward.
    """

    modules: tuple[str, ...]
    weights: tuple[Weight, ...]
    reshards: bool

    @property
    def name(self) -> str:
        """The modules, for tables."""
        return " + ".join(self.modules) if self.modules != (ROOT,) else "root"

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters has a gradient."""
        return any(weight.is_trained for weight in self.weights)

    def whole_bytes(self, num_ranks: int, version: int) -> int:
        """Bytes of the unit when gathered, padding included."""
        return round(sum(self._elements(w, num_ranks, version) * w.whole_bytes for w in self.weights))

    def stored_bytes(self, num_ranks: int, version: int) -> int:
        """Bytes of one rank's shard, of the rank that holds most."""
        return round(sum(self._elements(w, num_ranks, version) / num_ranks * w.stored_bytes for w in self.weights))

    def gradient_bytes(self) -> int:
        """Bytes of the unit's whole gradients, as backward makes them."""
        return round(sum(w.num_elements * w.whole_bytes for w in self.weights if w.is_trained))

    def reduced_bytes(self, num_ranks: int, version: int) -> int:
        """Bytes of one rank's part of the reduced gradients, in the dtype of the shards."""
        trained = [w for w in self.weights if w.is_trained]
        return round(sum(self._elements(w, num_ranks, version) / num_ranks * w.stored_bytes for w in trained))

    @staticmethod
    def _elements(weight: Weight, num_ranks: int, version: int) -> int:
        # FSDP2 fills up each parameter's rows; FSDP1 fills up the flattened unit, by less than one element a rank.
        return weight.padded_elements(num_ranks) if version == 2 else weight.num_elements


def find_units(model: Any, job: Job) -> list[Unit]:
    """Cut a model into units as the template's version and policy do; the root is the last.

    Raises:
        PlanError: the template's wrap class is not in the model.
    """
    reshards = not job.strategy.keeps_whole
    groups = (
        _groups_of_fsdp2(model, job, reshards) if job.strategy.version == 2 else _groups_of_fsdp1(model, job, reshards)
    )
    names = {id(module): name for name, module in model.named_modules()}
    known = dict(zip(map(id, model.parameters()), weights(model, job), strict=True))
    units: list[Unit] = []
    for modules, is_freed in groups:
        inside = [parameter for module in modules for parameter in module.parameters()]
        taken = tuple(weight for weight in (known.pop(id(p), None) for p in inside) if weight is not None)
        units.append(Unit(tuple(names[id(module)] for module in modules), taken, is_freed))
    return [unit for unit in units if unit.weights or unit.modules == (ROOT,)]


def _groups_of_fsdp2(model: Any, job: Job, reshards: bool) -> list[tuple[list[Any], bool]]:
    """Follow Accelerate: the policy's modules, the input embedding, the tail, the root.

    Source: accelerate 1.15 `utils/fsdp_utils.py`, `fsdp2_prepare_model`.
    """
    from accelerate.utils import fsdp_utils
    from accelerate.utils.other import get_module_children_bottom_up

    plugin = _plugin(model, job)
    policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    picked = [module for module in get_module_children_bottom_up(model)[:-1] if policy is not None and policy(module)]
    taken = {id(module) for module in picked}
    groups = [([module], reshards) for module in picked]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding is not None and head is not None and embedding.weight is head.weight
    if not is_tied and embedding is not None and id(embedding) not in taken:
        groups.append(([embedding], reshards))
    norm = fsdp_utils._find_final_norm(model)
    tail = [norm, embedding, head] if is_tied else [norm, head]
    tail = [module for module in tail if module is not None and id(module) not in taken]
    if tail:
        groups.append((tail, False))
    return [*groups, ([model], False)]


def _groups_of_fsdp1(model: Any, job: Job, reshards: bool) -> list[tuple[list[Any], bool]]:
    """Let torch's own recursion pick. The root stays whole after forward.

    Source: torch 2.13 `distributed/fsdp/wrap.py`, `_recursive_wrap`.
    """
    from torch.distributed.fsdp.wrap import _recursive_wrap

    picked: list[Any] = []

    def note(module: Any) -> Any:
        picked.append(module)
        return module

    policy = _plugin(model, job).auto_wrap_policy
    if job.lora_rank and job.loop == "trainer":
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(model)  # Trainer's own choice for adapters under FSDP1
    if policy is not None:
        _recursive_wrap(model, policy, note, set(), set(), only_wrap_children=True)
    return [*(([module], reshards) for module in picked), ([model], False)]


def _plugin(model: Any, job: Job) -> Any:
    """Make the plugin that Accelerate would make from the template, with its policy set for this model."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    strategy = job.strategy
    if job.loop == "trainer":
        registry.apply("size wrap")
    is_by_size = strategy.min_num_params is not None
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=strategy.version,
        auto_wrap_policy="size_based_wrap" if is_by_size else "transformer_based_wrap",
        transformer_cls_names_to_wrap=strategy.wrap_class.split(",") if strategy.wrap_class else None,
        min_num_params=strategy.min_num_params,
        reshard_after_forward=strategy.version == 2 or "full_shard",
        sync_module_states=False if strategy.version == 1 else None,
        cpu_ram_efficient_loading=False,
    )
    if job.loop == "script" and is_by_size:
        from functools import partial

        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

        plugin.auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=strategy.min_num_params)
        return plugin
    try:
        plugin.set_auto_wrap_policy(model)
    except ValueError as error:
        raise PlanError(
            f"{strategy.name}: {error} Remedy: drop the wrap class to take what the model declares."
        ) from error
    return plugin


def largest(units: Iterable[Unit], num_ranks: int, version: int) -> Unit:
    """Return the unit that is largest when gathered."""
    return max(units, key=lambda unit: unit.whole_bytes(num_ranks, version))


def names_to_watch(units: Iterable[Unit]) -> list[str]:
    """Return the modules whose forward and backward matter to the units, outer ones first."""
    names = {name for unit in units for name in unit.modules if name != ROOT}
    return sorted(names, key=lambda name: (name.count("."), name))


def last_layer(model: Any) -> str | None:
    """Return the name of the last decoder layer: the end of the longest module list."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        return None
    name, longest = max(lists, key=lambda item: (len(item[1]), -item[0].count(".")))
    return f"{name}.{len(longest) - 1}"
