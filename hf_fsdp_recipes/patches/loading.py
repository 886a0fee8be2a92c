"""The places in Accelerate and PEFT where a model on meta needs other handling; nothing else is patched.

Each acts only on models that carry a CheckpointSource and passes everything else through untouched.
`install` checks first that the places are where they were.

Source: accelerate 1.15 `accelerator.py` (`_prepare_fsdp2` maps optimizer parameters by data_ptr, which is 0
for every meta tensor; `fsdp2_prepare_model` shards; `prepare_model` hands `param_init_fn` to FSDP1, and casts
what FSDP1 has flattened without its views); torch 2.13 `_flat_param.py`, `FlatParamHandle._use_sharded_views`;
peft 0.21 `tuners_utils.py`, `lora/model.py` (adapters follow the base layer's device, here meta, and lose
their initial values).
"""

import functools
import inspect
from importlib.metadata import version
from typing import Any

import torch

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.metrics import stages

_is_installed = False


def install() -> None:
    """Patch Accelerate and PEFT for models on meta. Idempotent; no collective.

    Raises:
        LoadError: one of the places has moved.
    """
    global _is_installed
    if _is_installed:
        return
    _patch_accelerate()
    _patch_peft()
    _is_installed = True


def find_source(model: torch.nn.Module) -> tuple[torch.nn.Module, Any] | None:
    """Return the module that load_model marked and its CheckpointSource, wherever wrappers have put it."""
    for module in model.modules():
        source = module.__dict__.get("_checkpoint_source")
        if source is not None:
            return module, source
    return None


def _forget_source(marked: torch.nn.Module) -> None:
    from hf_fsdp_recipes.loading import resize

    del marked.__dict__["_checkpoint_source"]
    resize.untrack_resize(marked)


def _patch_accelerate() -> None:
    from accelerate import Accelerator, accelerator
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    _expect(accelerator, "fsdp2_prepare_model", ("accelerator", "model"), "accelerate")
    _expect(Accelerator, "_prepare_fsdp2", ("self",), "accelerate")
    _expect(Accelerator, "prepare_model", ("self", "model"), "accelerate")
    _expect(FlatParamHandle, "_use_sharded_views", ("self",), "torch")
    prepare_all, prepare_one, shard = (
        Accelerator._prepare_fsdp2,
        Accelerator.prepare_model,
        accelerator.fsdp2_prepare_model,
    )

    @functools.wraps(prepare_all)
    def prepare_all_with_distinct_pointers(self: Any, *args: Any) -> Any:
        for model in args:
            if isinstance(model, torch.nn.Module) and find_source(model):
                _give_pointers(model)
        return prepare_all(self, *args)

    @functools.wraps(shard)
    def shard_then_fill(self: Any, model: torch.nn.Module) -> torch.nn.Module:
        found = find_source(model)
        if found is None:
            return shard(self, model)
        from torch.distributed.fsdp import CPUOffloadPolicy

        from hf_fsdp_recipes.loading import materialize

        plugin = self.state.fsdp_plugin
        materialize.broadcast_real(model, self.device)
        was_efficient, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
        try:
            model = shard(self, model)
        finally:
            plugin.cpu_ram_efficient_loading = was_efficient
        with stages.record("read into shards"):
            materialize.fill_sharded(model, found[1], self.device, isinstance(plugin.cpu_offload, CPUOffloadPolicy))
        stages.show()
        _forget_source(found[0])
        return model

    @functools.wraps(prepare_one)
    def prepare_fsdp1_by_units(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.state, "fsdp_plugin", None)
        found = find_source(model)
        if found is None or plugin is None or plugin.fsdp_version != 1:
            return prepare_one(self, model, *args, **kwargs)
        from hf_fsdp_recipes.loading import materialize, verify

        materialize.broadcast_real(model, self.device)
        materialize.fill_buffers(model, found[1], self.device)
        plugin.param_init_fn = materialize.unit_filler(model, found[1], self.device)
        plugin.sync_module_states = False
        with stages.record("read into shards"):
            result = prepare_one(self, model, *args, **kwargs)
        _show_upcast_parameters(result)
        stages.show()
        _forget_source(found[0])
        verify.check_buffers(result)
        return result

    Accelerator._prepare_fsdp2 = prepare_all_with_distinct_pointers
    Accelerator.prepare_model = prepare_fsdp1_by_units
    accelerator.fsdp2_prepare_model = shard_then_fill


def _show_upcast_parameters(model: torch.nn.Module) -> None:
    """Let FSDP1's parameters show that Accelerate has cast their unit to float32.

    Otherwise they are views of the unit as it was until it is first cut again, in the middle of the first forward: PEFT
    casts a layer's input to what its weights seem to be, and recomputation finds another dtype than the forward had.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        if handle is not None and handle._use_orig_params:
            handle._use_sharded_views()


def _give_pointers(model: torch.nn.Module) -> None:
    # Accelerate finds an optimizer's parameters again by data_ptr; on meta all of them are 0.
    for number, parameter in enumerate(model.parameters(), start=1):
        if parameter.is_meta:
            parameter.data_ptr = functools.partial(int, -number)


def _patch_peft() -> None:
    from peft.tuners.lora import LoraModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    _expect(BaseTunerLayer, "_move_adapter_to_device_of_base_layer", ("self", "adapter_name", "device"), "peft")
    move = BaseTunerLayer._move_adapter_to_device_of_base_layer

    @functools.wraps(move)
    def move_unless_to_meta(self: Any, adapter_name: str, device: torch.device | None = None) -> None:
        base = self.get_base_layer()
        if device is None and any(parameter.is_meta for parameter in base.parameters(recurse=False)):
            device = torch.device("cpu")
        move(self, adapter_name, device)

    BaseTunerLayer._move_adapter_to_device_of_base_layer = move_unless_to_meta
    _patch_expert_adapters()
    _patch_dora()
    _expect(BaseTuner, "inject_adapter", ("self", "model", "adapter_name"), "peft")
    inject = BaseTuner.inject_adapter

    @functools.wraps(inject)
    def inject_if_weights_do_not_matter(
        self: Any, model: torch.nn.Module, adapter_name: str, *rest: Any, **named: Any
    ) -> Any:
        if find_source(model):
            _check_adapter_init(self.peft_config[adapter_name])
        return inject(self, model, adapter_name, *rest, **named)

    BaseTuner.inject_adapter = inject_if_weights_do_not_matter
    for tuner in (LoraModel, BaseTuner):
        _expect(tuner, "_replace_module", ("self", "parent", "child_name", "new_module", "child"), "peft")
        tuner._replace_module = _keep_adapters_real(tuner._replace_module)


def _patch_expert_adapters() -> None:
    """Keep adapters of fused experts real: PEFT wraps those parameters in a class with a move of its own."""
    from peft.tuners.lora.layer import ParamWrapper

    _expect(ParamWrapper, "_move_adapter_to_device_of_base_layer", ("self", "adapter_name", "device"), "peft")
    _expect(ParamWrapper, "get_param", ("self",), "peft")
    move = ParamWrapper._move_adapter_to_device_of_base_layer

    @functools.wraps(move)
    def move_unless_to_meta(self: Any, adapter_name: str, device: torch.device | None = None) -> None:
        parameter = self.get_param()
        if not parameter.is_meta:
            move(self, adapter_name, device)
            return
        for matrix in (self.lora_A, self.lora_B):
            matrix[adapter_name] = matrix[adapter_name].to(dtype=parameter.dtype)

    ParamWrapper._move_adapter_to_device_of_base_layer = move_unless_to_meta


def _patch_dora() -> None:
    """Leave DoRA's magnitudes on meta where the base weights are, which they are computed from."""
    from peft.tuners.lora.dora import DoraLinearLayer

    from hf_fsdp_recipes.loading import dora

    _expect(DoraLinearLayer, "update_layer", ("self", "base_layer", "lora_A", "lora_B", "scaling"), "peft")
    update = DoraLinearLayer.update_layer

    @functools.wraps(update)
    def update_unless_on_meta(self: Any, *, base_layer: Any, lora_A: Any, lora_B: Any, **rest: Any) -> None:
        if base_layer.weight.is_meta:
            dora.defer_magnitude(self, base_layer, lora_A, lora_B)
        else:
            update(self, base_layer=base_layer, lora_A=lora_A, lora_B=lora_B, **rest)

    DoraLinearLayer.update_layer = update_unless_on_meta


def _check_adapter_init(config: Any) -> None:
    """Refuse adapters that start from the base weights, which are not there yet. Any rank, no collective."""
    init = getattr(config, "init_lora_weights", True)
    if init not in (True, False, "gaussian", "orthogonal"):
        raise LoadError(
            f"init_lora_weights={init!r}: such an adapter is computed from the base weights, and load_model brings them only "
            f"when the model is sharded. Rule: LoRA, rsLoRA or DoRA; zero, gaussian or orthogonal init. Remedy: one of "
            f"those, or load the model with from_pretrained."
        )


def _keep_adapters_real(replace: Any) -> Any:
    @functools.wraps(replace)
    def replace_and_restore(self: Any, parent: Any, child_name: str, new_module: Any, child: Any) -> None:
        real = {
            (module, leaf): parameter
            for module in new_module.modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and not parameter.is_meta
        }
        replace(self, parent, child_name, new_module, child)
        for (module, leaf), parameter in real.items():
            if module._parameters[leaf].is_meta:
                module._parameters[leaf] = parameter

    return replace_and_restore


def _expect(owner: Any, name: str, parameters: tuple[str, ...], package: str) -> None:
    found = getattr(owner, name, None)
    actual = () if found is None else tuple(inspect.signature(found).parameters)
    if actual[: len(parameters)] != parameters:
        raise LoadError(
            f"{package} {version(package)} has no {owner.__name__}.{name}({', '.join(parameters)}), which loading on meta "
            f"leans on. Rule: tried with accelerate 1.15 and peft 0.21. Remedy: install one of those."
        )
