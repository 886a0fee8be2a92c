"""Adds kernels from the Hub to a model on meta, as `from_pretrained` does for `use_kernels` and `kernel_config`.

Source: transformers 5.23 `PreTrainedModel.from_pretrained` and `set_use_kernels`, `integrations/hub_kernels.py`.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed, model_class
from hf_fsdp_recipes.errors import LoadError, summarize

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import KernelConfig, PreTrainedConfig, PreTrainedModel

ARGUMENTS = ("use_kernels", "kernel_config", "allow_all_kernels")  # of `from_pretrained`


@dataclass(frozen=True)
class HubKernels:
    """Which kernels from the Hub to use in a model."""

    is_used: bool = False
    config: "KernelConfig | None" = None  # None for the kernels that transformers chooses
    allows_all: bool = False  # whether to also use kernels of publishers that the kernels package does not trust

    @contextlib.contextmanager
    def building(
        self, config: "PreTrainedConfig", auto_class: model_class.AutoClass, trust_remote_code: bool
    ) -> Iterator[None]:
        """Make transformers build models with the layer classes that some of the kernels in `kernel_config` need.

        These kernels expect other parameters than the original layers, for example those of several layers in one. `apply`
        then sets the kernels. Not a collective.
        """
        from transformers.integrations import hub_kernels

        with hub_kernels.allow_all_hub_kernels() if self.allows_all else contextlib.nullcontext():
            if self.config is not None:
                chosen, config = model_class.choose_class(config, auto_class, trust_remote_code)
                with _explained(chosen):
                    hub_kernels.register_kernel_replacements_and_fusions(chosen, config, self.config)
            yield

    def apply(self, model: "PreTrainedModel", accelerator: "Accelerator") -> None:
        """Replace the forward of a meta model's layers with kernels for the device that will hold the shards.

        Collective: every rank must call this. Downloads missing kernels, on rank 0 first.

        Raises:
            LoadError: on every rank, if a kernel cannot be used, or the shards are offloaded to the CPU.
        """
        if not self.is_used:
            return
        device, offload = accelerator.device, accelerator.state.fsdp_plugin.cpu_offload
        if device.type != "cpu" and (hasattr(offload, "pin_memory") or getattr(offload, "offload_params", False)):
            raise LoadError(
                "use_kernels does not work with fsdp_offload_params: transformers chooses kernels for the weights' device, the "
                "CPU. Drop one of the two."
            )
        from transformers.integrations import hub_kernels

        def replace() -> None:
            # transformers chooses kernels by the device of the model's first parameter and by `model.training`, so set both for
            # this call. Kernels for training also work in evaluation.
            parameters, was_training = model._parameters, model.training
            model._parameters = {"device": torch.nn.Parameter(torch.empty(0, device=device)), **parameters}
            model.training = True
            try:
                with (
                    _explained(type(model)),
                    hub_kernels.allow_all_hub_kernels() if self.allows_all else contextlib.nullcontext(),
                ):
                    model.set_use_kernels(True, self.config)
            finally:
                model._parameters, model.training = parameters, was_training

        distributed.main_first(replace)
        found = Counter(
            getattr(type(module), "kernel_layer_name", "") for module in model.modules() if _has_kernel(module)
        )
        layers = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
        distributed.print_main(f"kernels: {layers or f'no layer of this model has a kernel for {device.type}'}")


def take_arguments(kwargs: dict[str, Any]) -> HubKernels:
    """Remove the arguments for kernels from `from_pretrained`'s `kwargs`, and check them. Not a collective.

    Raises:
        LoadError: `kernel_config` is not a KernelConfig, or the `kernels` package is not installed in a version that transformers
            supports.
    """
    from transformers.integrations.hub_kernels import is_kernel
    from transformers.utils import import_utils, kernel_config

    use_kernels, config, allows_all = (kwargs.pop(name, None) for name in ARGUMENTS)
    if config is not None and not isinstance(config, kernel_config.KernelConfig):
        raise LoadError(
            f"kernel_config is a {type(config).__name__}. Pass a transformers.KernelConfig, or use_kernels=True."
        )
    attention = kwargs.get("attn_implementation")
    is_used = bool(use_kernels) or config is not None
    needed_by = "use_kernels" if is_used else f"attn_implementation {attention}"
    if (is_used or (isinstance(attention, str) and is_kernel(attention))) and not import_utils.is_kernels_available():
        try:
            found = version("kernels")
        except PackageNotFoundError:
            found = "none"
        wanted = f"kernels>={import_utils.KERNELS_MIN_VERSION},<{import_utils.KERNELS_MAX_VERSION}"
        raise LoadError(
            f"{needed_by} needs {wanted}; installed: {found}. Run pip install '{wanted}', or drop the argument."
        )
    return HubKernels(is_used, copy.deepcopy(config), bool(allows_all))  # transformers changes the config


def _has_kernel(module: torch.nn.Module) -> bool:
    replaced = module.__dict__.get("forward")
    return hasattr(type(module), "kernel_layer_name") and getattr(replaced, "__func__", None) not in (
        None,
        type(module).forward,
    )


@contextlib.contextmanager
def _explained(chosen: type) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # from the Hub, the kernels package or a kernel's own code
        raise LoadError(
            f"the kernels for {chosen.__name__} cannot be used: {type(error).__name__}: {summarize(error, 'line')}. Correct "
            f"kernel_config, or drop use_kernels."
        ) from error
