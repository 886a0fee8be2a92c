"""Shards a model from `load_model` and fills the shards with weights.

Until then, using the model raises an error.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import Module
from transformers import PreTrainedModel

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.bnb_4bit import Layers, check_storage, find_layers
from hf_fsdp_recipes.loading.checkpoint import Checkpoint
from hf_fsdp_recipes.loading.fill import (
    Reader,
    Tensors,
    allocate,
    copy_to_replicas,
    fill_directly,
    fill_from_rank0,
)
from hf_fsdp_recipes.loading.placeholder import (
    NOT_LOADED,
    OFFLINE,
    ROUNDED,
    Placeholder,
    is_placeholder,
    make_placeholder,
    move_to_meta,
    names_by_parameter,
    names_in_checkpoint,
)
from hf_fsdp_recipes.training.units import train_like_one_process
from hf_fsdp_recipes.upstream.patches import LOADER
from hf_fsdp_recipes.weights.rows import local_part


@dataclass(eq=False)
class Loader:
    """Fills one model when Accelerate prepares the model. Until then, nothing may use the model."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    dtype: torch.dtype  # of 4-bit weights before they are quantized
    is_direct: bool  # whether every rank reads its own rows
    revision: str | None  # of the model on the Hub

    def attach(self) -> None:
        """Become an attribute of the model. Running or saving the model then raises an error."""
        setattr(self.model, LOADER, self)
        self.model.save_pretrained = _refuse  # type: ignore[method-assign]
        self.shapes = {name: value.shape for name, value in self.model.named_parameters()}
        self.guard = self.model.register_forward_pre_hook(_refuse)

    def shard(
        self,
        accelerator: Accelerator,
        model: Module,
        shard: Callable,
    ) -> Module:
        """Shard the model and fill the shards. `shard` is Accelerate's own function. Collective."""
        plugin = accelerator.state.fsdp_plugin
        if plugin.ignored_modules is not None:
            raise LoadError(
                "fsdp_ignored_modules is set, but weights from load_model are only loaded into "
                "modules that are sharded. Remove it, or use from_pretrained."
            )
        device = accelerator.device
        if device.type == "cpu":
            # torch takes Accelerate's cpu:0 for another device, so each `to` would copy
            device = torch.device("cpu")
        for config in getattr(model, "peft_config", {}).values():
            config.revision = config.revision or self.revision  # PEFT does not know it
        distributed.set_timeout(getattr(accelerator.init_handler, "timeout", None))
        layers = find_layers(self.model, self.dtype)
        check_storage(layers, plugin.mixed_precision_policy)
        broadcast_adapters(model, device)
        untie_frozen(model)
        names_before = names_by_parameter(model)
        loaded_names = names_in_checkpoint(model, self.checkpoint)
        rounded = {
            name: getattr(parameter, ROUNDED, None)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        move_to_meta(model)
        if accelerator.mixed_precision != "no" and not layers:
            # Accelerate's own conversion has no effect in version 1.13.
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        with mock.patch.object(plugin, "cpu_ram_efficient_loading", False):
            model = shard(accelerator, model)
        check_tied(model, names_before.values())
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        targets = allocate(model, loaded_names, torch.device("cpu") if is_offloaded else device)
        self._check(targets)
        self._fill(layers, targets, device)
        round_off(model, rounded)
        delattr(self.model, LOADER)
        del self.model.save_pretrained
        self.guard.remove()
        train_like_one_process(model)
        return model

    def _fill(
        self,
        layers: Layers,
        targets: Tensors,
        device: torch.device,
    ) -> None:
        """Fill the shards. `device` is that of the ranks' default group. Collective."""
        read_directly = []
        sent_by_rank0 = []
        for entry in self.checkpoint.entries:
            if self.is_direct and entry.kind == "stored" and entry.name not in layers:
                read_directly.append(entry)
            else:
                sent_by_rank0.append(entry)
        fill_directly(self.checkpoint, read_directly, targets)
        fill_from_rank0(Reader(self.checkpoint, layers, targets, device), sent_by_rank0)
        copy_to_replicas(targets)

    def _check(self, targets: Tensors) -> None:
        """Raise a LoadError if a weight has changed its shape, or has no values."""
        read = {name for entry in self.checkpoint.entries for name in entry.names}
        filled = {target for name in read for target in targets.get(name, ())}
        for name, tensors in targets.items():
            if self.shapes.get(name, tensors[0].shape) != tensors[0].shape:
                raise LoadError(f"{name} changed its shape before it was loaded. {OFFLINE}.")
            if filled.isdisjoint(tensors):
                raise LoadError(f"{self.checkpoint} has no {name}, so it would have no values.")


@torch.no_grad()
def round_off(model: Module, rounded: dict[str, torch.dtype | None]) -> None:
    """Round weights that were cast to a narrower dtype, {name: dtype or None}, and then cast back.

    The names are those that the weights had before the model was sharded.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, dtype in rounded.items():
        part = local_part(parameters[name])
        if dtype and dtype.itemsize < part.itemsize:
            part.copy_(part.to(dtype))


def check_tied(model: Module, tied: Iterable[list[str]]) -> None:
    """Raise a LoadError if weights that are trained were tied, but are not any more.

    `tied` has the names that each weight had before the model was sharded.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in tied:
        separated = {parameters[name] for name in names}
        if len(separated) > 1 and parameters[names[0]].requires_grad:
            raise LoadError(
                f"{' and '.join(names)} are tied, but Accelerate separates them under FSDP2, so "
                f"both would train. Accelerate before 1.15 does so in every model. Use LoRA "
                f"without this weight in modules_to_save, or train without FSDP."
            )


def untie_frozen(model: Module) -> None:
    """Give frozen weights that are tied placeholders of their own.

    FSDP2 refuses a weight that belongs to two units. Accelerate makes one unit only of embeddings
    and an output head that are tied. Copies of PEFT's `modules_to_save` are not tied.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    owners = {head, embeddings} if weight is getattr(embeddings, "weight", None) else set()
    known = {weight} if owners else set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (
                isinstance(parameter, Placeholder)
                and not parameter.requires_grad
                and parameter in known
                and module not in owners
            ):
                setattr(module, name, make_placeholder(parameter))
            known.add(parameter)


def _refuse(*args: object, **kwargs: object) -> None:
    raise LoadError(NOT_LOADED)


def broadcast_adapters(model: Module, device: torch.device) -> None:
    """Broadcast rank 0's buffers, and its parameters that are no placeholders. Collective.

    Such parameters are those of adapters. Raise a LoadError if a tensor contains NaN, or if the
    ranks have different placeholders.
    """
    held = dict(model.named_buffers())
    held.update(item for item in model.named_parameters() if not is_placeholder(item[1]))
    main_names = distributed.from_main(list(held))
    with distributed.agreed():
        for name, value in held.items():
            if is_placeholder(value) or value.isnan().any():
                raise LoadError(
                    f"{name} contains NaN. If it was made from a weight that was not loaded, or "
                    f"changed in part before it was loaded: {OFFLINE}."
                )
        different = sorted(held.keys() ^ set(main_names))
        if different:
            raise LoadError(
                f"{different[:3]} were changed on some ranks only. Do the same on every rank: rank "
                "0's values are sent to the others."
            )
    if not distributed.can_send(device.type):
        device = torch.device("cpu")
    for value in held.values():
        sent = value.detach().to(device).contiguous()
        dist.broadcast(sent, 0)
        value.data = sent.to(value.device)
