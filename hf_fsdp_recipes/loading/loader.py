"""Shards a model from `load_model` and fills the shards with weights. Until then, using the model raises an error."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedModel

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading import bnb_4bit, fill
from hf_fsdp_recipes.loading.checkpoint import Checkpoint, Entry
from hf_fsdp_recipes.loading.placeholder import NOT_LOADED, OFFLINE, is_placeholder, move_to_meta
from hf_fsdp_recipes.upstream.patches import LOADER

Shard = Callable[[Accelerator, torch.nn.Module], torch.nn.Module]


class Loader:
    """Fills one model when Accelerate prepares the model. Until then, this loader is an attribute of the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        entries: Sequence[Entry],
        is_direct: bool,
    ) -> None:
        self.model, self.checkpoint, self.entries, self.is_direct = (
            model,
            checkpoint,
            entries,
            is_direct,
        )
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        model.__dict__[LOADER] = self
        model.__dict__["save_pretrained"] = _refuse
        self._guard = model.register_forward_pre_hook(_refuse)

    def shard(
        self, accelerator: Accelerator, model: torch.nn.Module, shard: Shard
    ) -> torch.nn.Module:
        """Shard the model with `shard`, which is Accelerate's own function, and fill the shards. Collective."""
        plugin, device = accelerator.state.fsdp_plugin, accelerator.device
        if device.type == "cpu":
            device = torch.device(
                "cpu"
            )  # torch takes Accelerate's cpu:0 for another device, so each `to` would copy
        bnb_4bit.check_storage(self.model, plugin.mixed_precision_policy)
        broadcast_adapters(model, device)
        move_to_meta(model)
        if accelerator.mixed_precision != "no" and not bnb_4bit.find_layers(self.model):
            for (
                parameter
            ) in model.parameters():  # Accelerate's own conversion has no effect in version 1.13
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        was_efficient, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
        try:
            model = shard(accelerator, model)
        finally:
            plugin.cpu_ram_efficient_loading = was_efficient
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        self.fill(model, torch.device("cpu") if is_offloaded else device, device)
        del self.model.__dict__[LOADER], self.model.__dict__["save_pretrained"]
        self._guard.remove()
        return model

    def fill(self, model: torch.nn.Module, home: torch.device, device: torch.device) -> None:
        """Allocate a model's shards on the device `home` and fill them. The model computes on `device`. Collective."""
        targets = fill.allocate(model, home)
        changed = [
            name
            for name, shape in self.shapes.items()
            if name in targets and targets[name][0].shape != shape
        ]
        if changed:
            raise LoadError(f"{changed[0]} changed its shape before it was loaded. {OFFLINE}.")
        filled = {
            target
            for entry in self.entries
            for name in entry.names
            for target in targets.get(name, ())
        }
        for name, found in targets.items():
            if isinstance(found[0], torch.nn.Parameter) and filled.isdisjoint(found):
                raise LoadError(
                    f"{name} is tied to another weight, but Accelerate separates them under FSDP2, so the model cannot be "
                    f"sharded. Install accelerate 1.15 or newer, or train it without FSDP."
                )
        packed = bnb_4bit.find_layers(self.model)
        is_read = {
            e: self.is_direct and e.is_stored and e.names[0] not in packed for e in self.entries
        }
        if self.is_direct:
            fill.fill_directly(
                self.checkpoint, [entry for entry in self.entries if is_read[entry]], targets
            )
        others = [entry for entry in self.entries if not is_read[entry]]
        fill.fill_from_rank0(self.model, self.checkpoint, others, targets, device)
        fill.copy_to_replicas(targets)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise LoadError(NOT_LOADED)


def broadcast_adapters(model: torch.nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's values of all parameters that are not placeholders, such as those of adapters. Collective."""
    for name, parameter in model.named_parameters():
        if not is_placeholder(parameter):
            value = parameter.detach().to(device)
            dist.broadcast(value, 0)
            if not value.isfinite().all():
                raise LoadError(
                    f"{name} was computed from a weight that is not loaded yet, for example by OLoRA, DoRA or "
                    f"resize_token_embeddings. {OFFLINE}."
                )
            parameter.data.copy_(value)
