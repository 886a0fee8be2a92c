"""Materializes FSDP1's units one at a time, because FSDP1 flattens a unit's full parameters before sharding."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed, parameter_names
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading import bnb_4bit, dora, lora_init, resize, verify
from hf_fsdp_recipes.loading.checkpoint_source import (
    CheckpointSource,
    check_sources,
    fill_buffers,
    full_target,
)
from hf_fsdp_recipes.loading.distribute import WeightStream
from hf_fsdp_recipes.loading.read_ranges import PROGRESS_TITLE
from hf_fsdp_recipes.metrics import progress

if TYPE_CHECKING:
    from accelerate import Accelerator


def prepare(
    accelerator: "Accelerator",
    model: torch.nn.Module,
    source: CheckpointSource,
    prepare_model: Callable[[], torch.nn.Module],
) -> torch.nn.Module:
    """Run Accelerate's `prepare_model` while filling FSDP1's units from the checkpoint. Collective: every rank must call this."""
    plugin = accelerator.state.fsdp_plugin
    stream = source.stream()
    fill_buffers(model, source, stream)
    plugin.sync_module_states = False
    original, plugin.param_init_fn = plugin.param_init_fn, _unit_filler(model, source, accelerator.device, stream)
    try:
        model = prepare_model()
    finally:
        plugin.param_init_fn = original
    stream.check()
    _refresh_parameter_views(model)
    names = ((parameter_names.in_base_model(name), parameter) for name, parameter in model.named_parameters())
    verify.check_finite([pair for pair in names if pair[0] not in source.quantized], source.name_or_path)
    return model


def _unit_filler(
    model: torch.nn.Module, source: CheckpointSource, device: torch.device, stream: WeightStream
) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return a `param_init_fn` for FSDP1: it fills a module's direct meta parameters, but not its buffers, which are real.

    This call and each call of the result are collectives.
    """
    with distributed.sync_errors():
        resize.apply_resize(model, source)
        if any(dora.is_magnitude(name) for name, _ in model.named_parameters()):
            raise LoadError(
                "use_dora is not supported under FSDP1: DoRA needs the shape of lora_A, which FSDP1 flattens. Use an fsdp2 "
                "template or plain LoRA."
            )
        if lora_init.has_deferred_adapters(model):
            raise LoadError(
                "PiSSA and OLoRA are not supported under FSDP1, which flattens the weights. Use an fsdp2 template or plain LoRA."
            )
        check_sources(model, source)
    full_names = {id(module): name for name, module in model.named_modules()}
    num_uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    shared: dict[int, torch.nn.Parameter] = {}
    sizes = {id(parameter): parameter.nbytes for parameter in model.parameters() if parameter.is_meta}
    bar = progress.bar(sum(sizes.values()), PROGRESS_TITLE)

    def fill(module: torch.nn.Module) -> torch.nn.Module:
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            real = shared.get(id(parameter))
            if real is None:
                name = f"{full_names[id(module)]}.{leaf}".lstrip(".")
                real = torch.nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                target = full_target(name, real, source)
                spec = source.quantized.get(parameter_names.in_base_model(name))
                if spec is not None:  # FSDP1 also flattens packed 4-bit weights
                    bnb_4bit.fill([(target, spec, module)], source.index, stream, False, device)
                else:
                    stream.fill([target])
                    stream.verify([target])
                bar.update(sizes[id(parameter)])
                if bar.n == bar.total:
                    bar.close()  # here, because FSDP1 does not say which call is the last
                if num_uses[id(parameter)] > 1:
                    shared[id(parameter)] = real
            module._parameters[leaf] = real
        return module

    return fill


def _refresh_parameter_views(model: torch.nn.Module) -> None:
    """Update FSDP1's parameter views after Accelerate has cast the flat parameters to float32 (torch 2.13 `_flat_param.py`).

    Otherwise the views keep the old dtype until the first reshard, in the middle of the first forward. PEFT casts a layer's input
    to the dtype of its weights, so activation checkpointing would recompute the layer in a dtype that differs from the forward's.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        if handle is not None and handle._use_orig_params:
            handle._use_sharded_views()
