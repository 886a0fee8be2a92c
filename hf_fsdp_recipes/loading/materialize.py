"""Fills a model on meta when Accelerate shards it, and verifies the result.

This module handles FSDP2; `fsdp1.py` materializes FSDP1's units.
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_fsdp_recipes import distributed, parameter_names
from hf_fsdp_recipes.configs.launch import check_num_processes
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading import bnb_4bit, dora, fsdp1, lora_init, resize, verify
from hf_fsdp_recipes.loading.checkpoint_source import (
    CheckpointSource,
    check_sources,
    fill_buffers,
    full_target,
)
from hf_fsdp_recipes.loading.hub_kernels import HubKernels
from hf_fsdp_recipes.loading.read_ranges import PROGRESS_TITLE, read_direct
from hf_fsdp_recipes.loading.shard_layout import ShardTarget, find_shard
from hf_fsdp_recipes.metrics import progress, stages
from hf_fsdp_recipes.patches.accelerate import LOADER_ATTRIBUTE
from hf_fsdp_recipes.patches.registry import Original
from hf_fsdp_recipes.peft_models import has_adapter

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


class MetaModelLoader:
    """Fills a model on meta while Accelerate prepares it. `patches/accelerate.py` finds the loader as an attribute of the model.

    Args:
        model: a model from `build_on_meta`.
        source: its checkpoint.
        kernels: the kernels from the Hub for the model's layers.
    """

    def __init__(self, model: "PreTrainedModel", source: CheckpointSource, kernels: HubKernels | None = None) -> None:
        self.source = source
        self._model = model
        self._kernels = kernels or HubKernels()

    def attach(self) -> None:
        """Attach the loader to its model until the model is filled, and track calls of `resize_token_embeddings`."""
        setattr(self._model, LOADER_ATTRIBUTE, self)
        resize.track_resize(self._model, self.source)

    def shard_fsdp2(self, accelerator: "Accelerator", model: torch.nn.Module, shard: Original) -> torch.nn.Module:
        """Let Accelerate shard the model, then fill the shards. Collective: every rank must call this."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        check_num_processes(accelerator.num_processes)
        self._kernels.apply(self._model, accelerator)
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
        self._model._is_fsdp_managed_module = True  # makes `generate` run the same number of forwards on every rank
        return model

    def prepare_fsdp1(
        self, accelerator: "Accelerator", model: torch.nn.Module, prepare: Callable[[], torch.nn.Module]
    ) -> torch.nn.Module:
        """Run Accelerate's `prepare_model` while filling FSDP1's units one by one. Collective: every rank must call this."""
        check_num_processes(accelerator.num_processes)
        self._kernels.apply(self._model, accelerator)
        broadcast_real_parameters(model, accelerator.device)
        with stages.record("read into shards"):
            model = fsdp1.prepare(accelerator, model, self.source, prepare)
        self._finish()
        verify.check_buffers(model)
        return model

    def prepare_frozen(self, accelerator: "Accelerator", model: torch.nn.Module) -> torch.nn.Module:
        """Shard and fill a model that is not trained, such as a reference model. Collective: every rank must call this."""
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        plugin = accelerator.state.fsdp_plugin
        names = ("auto_wrap_policy", "transformer_cls_names_to_wrap")
        kept = {name: getattr(plugin, name) for name in names}  # Accelerate overwrites them with this model's values
        model.requires_grad_(False)  # otherwise Accelerate would upcast it
        try:
            if plugin.fsdp_version == 1:
                model = accelerator.prepare_model(model)
                accelerator._models.remove(model)
            else:
                model = self.shard_fsdp2(accelerator, model, fsdp2_prepare_model)
                # By default, the root and the head stay gathered until the backward pass, which a frozen model does not have.
                model.set_reshard_after_forward(True)
        finally:
            vars(plugin).update(kept)
        return model.eval()

    def fingerprint(self, model: torch.nn.Module) -> str:
        """Return a hash of the model's shapes and dtypes and of its files' paths, sizes and modification times.

        Use the hash from rank 0: ranks that do not read the checkpoint return an empty string.

        Raises:
            LoadError: the model has adapters.
        """
        if has_adapter(model):
            raise LoadError(
                "precompute_ref_log_probs needs the base model's outputs before the model with its adapter is sharded and its "
                "weights are loaded. Pass ref_model=load_model(...) to the trainer."
            )
        if self.source.index is None:
            return ""
        files = {stored.file for stored in self.source.stored.values()}
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files) if file.exists()]
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()]
        return hashlib.sha256(repr((stats, shapes)).encode()).hexdigest()

    def _finish(self) -> None:
        stages.show()
        for attribute in (LOADER_ATTRIBUTE, "resize_token_embeddings"):
            self._model.__dict__.pop(attribute, None)


def broadcast_real_parameters(model: torch.nn.Module, device: torch.device) -> None:
    """Before sharding, broadcast the parameters that are not on meta, such as adapters, from rank 0. Collective."""
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
        model: an FSDP2 model with DTensors sharded on dimension 0; plain tensors are replicated.
        source: the checkpoint.
        device: this rank's compute device.
        is_offloaded: whether shards are on the CPU (CPUOffloadPolicy).

    Raises:
        LoadError: on every rank, if a parameter has no source or an unsupported placement, or if a weight cannot be read,
            arrives changed, or contains NaN or infinity.
    """
    with distributed.sync_errors():
        resize.apply_resize(model, source)
        check_sources(model, source)
        sharded, replicated, packed = _allocate(model, source, torch.device("cpu") if is_offloaded else device)
    stream = source.stream()
    sums: list[torch.Tensor | None] = []
    if source.is_direct:
        with distributed.sync_errors(distributed.patient_group()):
            assert source.index is not None
            sums = read_direct(sharded, source.index)
    else:
        num_bytes = sum(target.num_elements * target.stored_dtype.itemsize for target in sharded)
        with progress.bar(num_bytes, PROGRESS_TITLE) as bar:
            stream.fill(sharded, advance=bar.update)
        stream.verify(sharded)
    bnb_4bit.fill(packed, source.index, stream, source.is_direct, device)
    stream.fill(replicated)
    stream.verify(replicated)
    fill_buffers(model, source, stream)
    stream.check()
    loaded = [(target.name, target.local) for target in [*sharded, *replicated]]
    verify.check_finite(loaded, source.name_or_path, sums)  # first, because NaN would break the computation of adapters
    lora_init.compute_adapters(model, device)
    dora.fill_magnitudes(model)
    verify.check_model(model)
    if source.index is not None:
        source.index.close()


def _allocate(
    model: torch.nn.Module, source: CheckpointSource, device: torch.device
) -> tuple[list[ShardTarget], list[ShardTarget], list[bnb_4bit.Packed]]:
    """Replace meta parameters with real ones; return the sharded, replicated and 4-bit targets to fill."""
    sharded: list[ShardTarget] = []
    replicated: list[ShardTarget] = []
    packed: list[bnb_4bit.Packed] = []
    # A parameter's id -> the modules that hold it, and its name in each.
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
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
        target = _shard_target(name, real, source)
        spec = source.quantized.get(parameter_names.in_base_model(name))
        if spec is not None:
            layer, _ = owners[id(parameter)][0]
            packed.append((target, spec, layer))
        else:
            sharded.append(target)

    def position_in_files(target: ShardTarget) -> tuple[str, int]:
        stored = source.stored[target.ranges[0].tensor]
        return str(stored.file), stored.start

    sharded.sort(key=position_in_files)
    packed.sort(key=lambda item: position_in_files(item[0]))
    return sharded, replicated, packed


def _shard_target(name: str, parameter: DTensor, source: CheckpointSource) -> ShardTarget:
    found = find_shard(parameter)
    local = parameter.detach().to_local().view(-1)
    if found is None or found[1] != local.numel():
        raise LoadError(
            f"{name}: this rank holds {local.numel()} elements under {tuple(parameter.placements)}; only full and hybrid "
            f"sharding by rows are supported. Remove tensor, context and expert parallelism from the Accelerate config."
        )
    ranges = source.ranges[parameter_names.in_base_model(name)]
    return ShardTarget(name, ranges, source.stored[ranges[0].tensor].dtype, parameter.dtype, found[0], local)
