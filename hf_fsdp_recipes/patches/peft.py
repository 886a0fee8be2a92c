"""Patches for PEFT: adapters on a base model whose weights are on meta.

PEFT moves adapters to the device of their base layer, so adapters of a layer on meta would lose their initial values. Calling
`reset_lora_parameters` after loading would use another random state, so LoRA runs would differ from runs without this package.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes.environment import fsdp_version
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.patches.registry import Original, Patch

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

_patch = functools.partial(
    Patch,
    feature="loading",
    upstream="to file: inject_adapter on a base model on meta discards the adapters' initial values",
)


@_patch(
    "peft.tuners.tuners_utils.BaseTunerLayer._move_adapter_to_device_of_base_layer(self, adapter_name, device)",
    changes="Adapters of a base layer on meta stay on the CPU.",
    reason="Adapters moved to meta would lose their initial values.",
)
def _move_unless_to_meta(
    original: Original, self: "BaseTunerLayer", adapter_name: str, device: torch.device | None = None
) -> None:
    if device is None and any(parameter.is_meta for parameter in self.get_base_layer().parameters(recurse=False)):
        device = torch.device("cpu")
    original(self, adapter_name, device)


@_patch(
    "peft.tuners.lora.layer.ParamWrapper._move_adapter_to_device_of_base_layer(self, adapter_name, device)",
    changes="Adapters of fused experts on meta stay on the CPU.",
    reason="`ParamWrapper` overrides the method of `BaseTunerLayer`. On meta the adapters would lose their initial values.",
)
def _move_expert_adapter_unless_to_meta(
    original: Original, self: "ParamWrapper", adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    parameter = self.get_param()
    if not parameter.is_meta:
        original(self, adapter_name, *args, **kwargs)
        return
    for matrix in (self.lora_A, self.lora_B):
        matrix[adapter_name] = matrix[adapter_name].to(dtype=parameter.dtype)


@_patch(
    "peft.tuners.lora.dora.DoraLinearLayer.update_layer(self, base_layer, lora_A, lora_B, scaling)",
    changes="DoRA's magnitudes stay on meta until the base weights are loaded.",
    reason="DoRA's magnitudes are norms of base weights, which are not loaded yet.",
)
def _defer_magnitude(
    original: Original,
    self: "DoraLinearLayer",
    *,
    base_layer: torch.nn.Module,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    **rest: Any,
) -> None:
    if not base_layer.weight.is_meta:
        original(self, base_layer=base_layer, lora_A=lora_A, lora_B=lora_B, **rest)
        return
    kind = type(base_layer).__name__
    if type(self).__name__ != "DoraLinearLayer" or self.fan_in_fan_out or kind == "Linear4bit":
        raise LoadError(
            f"use_dora is not supported for {kind} layers: load_model computes DoRA's magnitudes only for unquantized linear "
            f"layers. Remove these layers from lora_target_modules, or drop use_dora."
        )
    dtype = torch.promote_types(base_layer.weight.dtype, lora_A.dtype)
    self.weight = torch.nn.Parameter(torch.empty(lora_B.shape[0], dtype=dtype, device="meta"))


# Attribute of a LoRA layer that holds the adapter's name and a function, which runs PEFT's initialization on a given layer.
DEFERRED_INIT = "_deferred_init"


def _defer_init(original: Original, self: "LoraLayer", adapter_name: str, *args: Any) -> None:
    base = self.get_base_layer()
    if not base.weight.is_meta:
        original(self, adapter_name, *args)
        return
    kind = type(base).__name__
    if kind not in ("Linear", "Conv1D"):
        raise LoadError(
            f"PiSSA and OLoRA are not supported for {kind} layers: load_model computes their adapters only for unquantized linear "
            f"layers. Remove these layers from lora_target_modules, or use the default init_lora_weights."
        )
    setattr(self, DEFERRED_INIT, (adapter_name, lambda layer: original(layer, adapter_name, *args)))


for _init in ("pissa_init(self, adapter_name, init_lora_weights)", "olora_init(self, adapter_name)"):
    _patch(
        f"peft.tuners.lora.layer.LoraLayer.{_init}",
        changes="The computation of an adapter from a base weight on meta is delayed until the weight is loaded.",
        reason="PEFT would decompose a weight without values.",
    )(_defer_init)


LINEAR_LAYERS = "lora_target_modules: [q_proj, k_proj, v_proj, o_proj]"


@_patch(
    "peft.tuners.tuners_utils.BaseTuner.inject_adapter(self, model, adapter_name)",
    changes="Initializations other than PiSSA and OLoRA that need the base weights (pissa_niter_*, LoftQ, CorDA, ...) raise an "
    "error if the base model is on meta. Adapters of fused experts raise an error if PEFT or FSDP1 does not support them.",
    reason="The weights are not loaded yet, so PEFT would fail in the middle of a decomposition. Unsupported adapters of experts "
    "would fail in the first step, or with a message that does not name the setting.",
)
def _inject_unless_weights_are_needed(
    original: Original, self: "BaseTuner", model: torch.nn.Module, adapter_name: str, *args: Any, **kwargs: Any
) -> object:
    init = getattr(self.peft_config[adapter_name], "init_lora_weights", True)
    is_supported = init in (True, False, "gaussian", "orthogonal", "pissa") or str(init).lower() == "olora"
    is_loading = any(p.is_meta for p in model.parameters())
    if not is_supported and is_loading:
        raise LoadError(
            f"init_lora_weights={init!r} computes the adapter from the base weights, which load_model fills in later. Use pissa, "
            f"olora, gaussian, orthogonal or the default, or load the model with from_pretrained."
        )
    try:
        injected = original(self, model, adapter_name, *args, **kwargs)
    except (AttributeError, ValueError) as error:
        if "ParamWrapper" not in str(error) and "Experts' object has no attribute 'weight'" not in str(error):
            raise
        raise LoadError(
            f"PEFT cannot adapt fused experts with these settings ({str(error).rstrip('.')}). Set lora_dropout: 0, use_dora: false "
            f"and the default init_lora_weights, or adapt only linear layers ({LINEAR_LAYERS})."
        ) from error
    if is_loading and fsdp_version() == 1 and any(type(m).__name__ == "ParamWrapper" for m in model.modules()):
        raise LoadError(
            f"adapters of fused experts (lora_target_parameters; all-linear includes them in some models) are not supported under "
            f"FSDP1, which flattens their matrices. Use an fsdp2_*.yaml template, or adapt only linear layers ({LINEAR_LAYERS})."
        )
    return injected


def _replace_and_keep_adapters(
    original: Original,
    self: "BaseTuner",
    parent: torch.nn.Module,
    child_name: str,
    new_module: torch.nn.Module,
    child: torch.nn.Module,
) -> None:
    real = {
        (module, leaf): parameter
        for module in new_module.modules()
        for leaf, parameter in module._parameters.items()
        if parameter is not None and not parameter.is_meta
    }
    original(self, parent, child_name, new_module, child)
    for (module, leaf), parameter in real.items():
        if module._parameters[leaf].is_meta:
            module._parameters[leaf] = parameter


for _tuner in ("peft.tuners.tuners_utils.BaseTuner", "peft.tuners.lora.model.LoraModel"):
    _patch(
        f"{_tuner}._replace_module(self, parent, child_name, new_module, child)",
        changes="Adapters keep their values when a module is replaced.",
        reason="PEFT moves the new module to the base weight's device, which is meta here.",
    )(_replace_and_keep_adapters)
