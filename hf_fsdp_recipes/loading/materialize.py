"""Fills a model that was built on meta when Accelerate shards it, and verifies the result.

This module handles FSDP2; `fsdp1.py` materializes FSDP1's units.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed, parameter_names
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading import bnb_4bit, dora, fsdp1, resize, verify
from hf_fsdp_recipes.loading.checkpoint_source import (
    CheckpointSource,
    check_sources,
    fill_buffers,
    full_target,
    raise_read_errors,
)
from hf_fsdp_recipes.loading.distribute import broadcast_full, scatter
from hf_fsdp_recipes.loading.read_ranges import read_direct
from hf_fsdp_recipes.loading.shard_layout import ShardGroup, ShardTarget, find_shard_group, row_range
from hf_fsdp_recipes.metrics import stages
from hf_fsdp_recipes.patches.accelerate import LOADER_ATTRIBUTE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MetaModelLoader:
    """Fills a model on meta while Accelerate prepares it; `patches/accelerate.py` finds it on the model.

    Args:
        model: from `build_on_meta`.
        source: its checkpoint.
    """

    def __init__(self, model: "PreTrainedModel", source: CheckpointSource) -> None:
        self.source = source
        self._model = model

    def attach(self) -> None:
        """Attach the loader to its model until the model is filled, and track calls of `resize_token_embeddings`."""
        setattr(self._model, LOADER_ATTRIBUTE, self)
        resize.track_resize(self._model, self.source)

    def shard_fsdp2(
        self, accelerator: Any, model: torch.nn.Module, shard: Callable[[Any, torch.nn.Module], torch.nn.Module]
    ) -> torch.nn.Module:
        """Shard the model with Accelerate's own step, then fill the shards. Collective: every rank must call this."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        plugin = accelerator.state.fsdp_plugin
        broadcast_real_parameters(model, accelerator.device)
        was_efficient, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
        try:
            model = shard(accelerator, model)
        finally:
            plugin.cpu_ram_efficient_loading = was_efficient
        with stages.record("read into shards"):
            fill_sharded(model, self.source, accelerator.device, isinstance(plugin.cpu_offload, CPUOffloadPolicy))
        self._finish()
        return model

    def prepare_fsdp1(
        self, accelerator: Any, model: torch.nn.Module, prepare: Callable[[], torch.nn.Module]
    ) -> torch.nn.Module:
        """Run Accelerate's own `prepare_model` with units materialized one by one. Collective: every rank must call this."""
        broadcast_real_parameters(model, accelerator.device)
        fill_buffers(model, self.source, accelerator.device)
        with stages.record("read into shards"):
            model = fsdp1.prepare(accelerator, model, self.source, prepare)
        self._finish()
        verify.check_buffers(model)
        return model

    def _finish(self) -> None:
        stages.show()
        for attribute in (LOADER_ATTRIBUTE, "resize_token_embeddings"):
            self._model.__dict__.pop(attribute, None)


def broadcast_real_parameters(model: torch.nn.Module, device: torch.device) -> None:
    """Broadcast parameters that are real before sharding, such as adapters, from rank 0. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for parameter in model.parameters():
        if not parameter.is_meta:
            values = parameter.detach().to(device)
            dist.broadcast(values, src=0)
            parameter.data.copy_(values)


def fill_sharded(model: torch.nn.Module, source: CheckpointSource, device: torch.device, is_offloaded: bool) -> None:
    """Fill every meta DTensor of an FSDP2 model with this rank's shard of the checkpoint.

    Collective: every rank must call this, after `fully_shard` and before the first forward.

    Args:
        model: an FSDP2 model with DTensors sharded on dimension 0 over one mesh; plain tensors are replicated.
        source: the checkpoint.
        device: this rank's compute device.
        is_offloaded: whether shards are on the CPU (CPUOffloadPolicy).

    Raises:
        LoadError: on every rank, if a parameter has no source or an unsupported placement, or a checksum differs.
    """
    with distributed.sync_errors():
        resize.apply_resize(model, source)
        check_sources(model, source)
        sharded, replicated, packed, group = _allocate(model, source, torch.device("cpu") if is_offloaded else device)
    checksums = None if source.is_direct else verify.Checksums(covers_all=source.verify == "full")
    if group is not None and checksums is None:
        with distributed.sync_errors(distributed.patient_group()):
            assert source.index is not None
            read_direct(sharded, source.index, group.shard_rank)
    elif group is not None and checksums is not None:
        scatter(sharded, source.index, group, checksums)
    if group is not None and packed:
        bnb_4bit.scatter(packed, source.index, group, checksums, device)
        bnb_4bit.check_states([layer for _, _, layer in packed])
    for target in replicated:
        broadcast_full(target, source.index, device)
    fill_buffers(model, source, device)
    raise_read_errors(source)
    dora.fill_magnitudes(model)
    targets = [*sharded, *replicated, *(target for target, _, _ in packed)]
    verify.check_finite([(target.name, target.local) for target in [*sharded, *replicated]], source.name_or_path)
    verify.check_model(model, targets, checksums, group.shard_rank if group else 0)
    if source.index is not None:
        source.index.close()


def _allocate(
    model: torch.nn.Module, source: CheckpointSource, device: torch.device
) -> tuple[list[ShardTarget], list[ShardTarget], list[bnb_4bit.Packed], ShardGroup | None]:
    """Replace meta parameters with real ones; return the targets to fill, in file order."""
    sharded: list[ShardTarget] = []
    replicated: list[ShardTarget] = []
    packed: list[bnb_4bit.Packed] = []
    group: ShardGroup | None = None
    owners: dict[int, list[tuple[Any, str]]] = {}  # by id of the parameter
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append((module, leaf))
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        real = torch.nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        for module, leaf in owners[id(parameter)]:
            module._parameters[leaf] = real
        if dora.is_magnitude(name):
            continue
        if not hasattr(parameter, "device_mesh"):
            replicated.append(full_target(name, real, source))
            continue
        group = group or find_shard_group(parameter.device_mesh, parameter.placements)
        target = _shard_target(name, real, source, group)
        if target.is_packed:
            layer, _ = owners[id(parameter)][0]
            packed.append((target, source.quantized[parameter_names.in_base_model(name)], layer))
        else:
            sharded.append(target)

    def position_in_files(target: ShardTarget) -> tuple[str, int]:
        stored = source.stored[target.ranges[0].tensor]
        return str(stored.file), stored.start

    sharded.sort(key=position_in_files)
    packed.sort(key=lambda item: position_in_files(item[0]))
    return sharded, replicated, packed, group


def _shard_target(name: str, parameter: Any, source: CheckpointSource, group: ShardGroup) -> ShardTarget:
    base_name = parameter_names.in_base_model(name)
    ranges = source.ranges[base_name]
    is_packed = base_name in source.quantized
    stored_dtype = parameter.dtype if is_packed else source.stored[ranges[0].tensor].dtype
    local = parameter.detach().to_local().view(-1)
    num_shards = len(group.ranks)
    shard_ranges = [row_range(parameter.shape, num_shards, shard_rank) for shard_rank in range(num_shards)]
    expected = shard_ranges[group.shard_rank][1]
    if expected != local.numel():
        raise LoadError(f"{name}: this rank holds {local.numel()} elements; sharding by rows gives it {expected}")
    return ShardTarget(name, ranges, stored_dtype, parameter.dtype, shard_ranges, local, is_packed)
