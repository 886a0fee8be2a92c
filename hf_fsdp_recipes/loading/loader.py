"""Shards a model from `load_model` and fills the shards with weights.

Until then, using the model raises an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.bnb_4bit import check_storage, find_layers
from hf_fsdp_recipes.loading.checkpoint import Checkpoint, Entry
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
    Placeholder,
    is_placeholder,
    move_to_meta,
)
from hf_fsdp_recipes.training.units import train_like_one_process
from hf_fsdp_recipes.upstream.patches import LOADER
from hf_fsdp_recipes.upstream.transformers_internals import find_tied


@dataclass(eq=False)
class Loader:
    """Fills one model when Accelerate prepares the model. Until then, nothing may use the model."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    entries: Sequence[Entry]
    dtype: torch.dtype  # of 4-bit weights before they are quantized
    is_direct: bool  # whether every rank reads its own rows

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
        device = accelerator.device
        if device.type == "cpu":
            # torch takes Accelerate's cpu:0 for another device, so each `to` would copy
            device = torch.device("cpu")
        layers = find_layers(self.model, self.dtype)
        check_storage(layers, plugin.mixed_precision_policy)
        broadcast_adapters(model, device)
        untie_frozen(model)
        move_to_meta(model)
        if accelerator.mixed_precision != "no" and not layers:
            # Accelerate's own conversion has no effect in version 1.13.
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        with mock.patch.object(plugin, "cpu_ram_efficient_loading", False):
            model = shard(accelerator, model)
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        targets = allocate(model, torch.device("cpu") if is_offloaded else device)
        self._join_tied(targets)
        read_directly = []
        sent_by_rank0 = []
        for entry in self.entries:
            if self.is_direct and entry.kind == "stored" and entry.name not in layers:
                read_directly.append(entry)
            else:
                sent_by_rank0.append(entry)
        fill_directly(self.checkpoint, read_directly, targets)
        fill_from_rank0(Reader(self.model, self.checkpoint, layers, targets, device), sent_by_rank0)
        copy_to_replicas(targets)
        delattr(self.model, LOADER)
        del self.model.save_pretrained
        self.guard.remove()
        train_like_one_process(model)
        return model

    def _join_tied(self, targets: Tensors) -> None:
        """Let two tied weights that Accelerate has separated get the same values.

        A weight that is trained must stay tied, and no weight may change its shape: otherwise,
        raise a LoadError. PEFT's copies of a frozen weight are not tied.
        """
        for tied, saved in find_tied(self.model).items():
            parts = targets.get(tied, [])
            if saved in targets and not all(part.requires_grad for part in parts):
                originals = targets[saved]
                originals[:] = dict.fromkeys(originals + parts)
                targets[tied] = originals
        filled = {
            target
            for entry in self.entries
            for name in entry.names
            for target in targets.get(name, ())
        }
        for name, tensors in targets.items():
            shape = tensors[0].shape
            if self.shapes.get(name, shape) != shape:
                raise LoadError(f"{name} changed its shape before it was loaded. {OFFLINE}.")
            if isinstance(tensors[0], Parameter) and filled.isdisjoint(tensors):
                raise LoadError(
                    f"{name} is tied to another weight, but Accelerate separates them under FSDP2, "
                    f"so both would train. Accelerate before 1.15 does so in every model. Use LoRA "
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
                setattr(module, name, Placeholder(parameter))
            known.add(parameter)


def _refuse(*args: object, **kwargs: object) -> None:
    raise LoadError(NOT_LOADED)


def broadcast_adapters(model: Module, device: torch.device) -> None:
    """Broadcast rank 0's values of all parameters that are not placeholders. Collective.

    These are parameters such as those of adapters.
    """
    for name, parameter in model.named_parameters():
        if not is_placeholder(parameter):
            value = parameter.detach().to(device)
            dist.broadcast(value, 0)
            if not value.isfinite().all():
                raise LoadError(
                    f"{name} was computed from a weight that is not loaded yet, for example by "
                    f"OLoRA, DoRA or resize_token_embeddings. {OFFLINE}."
                )
            parameter.data.copy_(value)
