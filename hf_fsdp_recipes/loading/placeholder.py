"""Placeholders are the parameters of a model until its weights are loaded.

A placeholder has the shape and dtype of its weight, but all its elements share one NaN in host memory. Unlike meta tensors,
placeholders have a device and distinct addresses, so PEFT, TRL, Trainer, optimizers and Accelerate handle them like weights.
Writing to a placeholder raises an error. A result computed from a placeholder is NaN, never a plausible number.
"""

from typing import Any

import torch

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.upstream.torch_internals import make_parameter, run_on_plain_tensors

OFFLINE = "Change the model without FSDP, save it, and train the saved model"
NOT_LOADED = (
    "the model's weights are not loaded yet: they are loaded when the Trainer or Accelerator that trains the model shards it. "
    "Train first, or use from_pretrained for a model that is not trained, such as a reference model; LoRA needs none."
)
_CASTS = (
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
)


class Placeholder(torch.nn.Parameter):
    """A parameter that takes no memory. Its copies, such as PEFT's `modules_to_save`, are placeholders too."""

    def __new__(cls, like: torch.Tensor) -> "Placeholder":
        """Return a placeholder for a tensor on any device."""
        return make_parameter(cls, nan_like(like), like.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placeholder":
        """Return another placeholder, because torch's default copy would allocate the full tensor."""
        return memo.setdefault(id(self), Placeholder(self))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse casts: PiSSA, OLoRA and DoRA cast a weight before they read it, but a placeholder has no values to read."""
        if (
            function is torch.Tensor.is_contiguous
        ):  # `fully_shard` calls it first, and only `Loader` may shard
            raise LoadError(NOT_LOADED)
        if function in _CASTS and (
            function is not torch.Tensor.to or isinstance(args[1], torch.dtype)
        ):
            raise LoadError(
                "a weight is read before it is loaded, for example by init_lora_weights='pissa' or 'olora', or by DoRA. Use plain "
                f"LoRA. Or: {OFFLINE[0].lower()}{OFFLINE[1:]}."
            )
        return run_on_plain_tensors(function, types, args, kwargs or {})


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype. All its elements share a single NaN in host memory."""
    return torch.full((), float("nan"), dtype=tensor.dtype).expand(tensor.shape)


def is_placeholder(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a placeholder. Its class may also be that of bitsandbytes' packed weights."""
    has_no_memory = parameter.ndim > 0 and not any(parameter.stride()) and parameter.numel() > 1
    return isinstance(parameter, Placeholder) or has_no_memory


def insert_placeholders(model: torch.nn.Module) -> None:
    """Replace a model's meta parameters with placeholders."""
    for parameter in model.parameters():
        if parameter.is_meta and type(parameter) is torch.nn.Parameter:
            torch.utils.swap_tensors(parameter, Placeholder(parameter))


def move_to_meta(model: torch.nn.Module) -> None:
    """Replace a model's placeholders with meta parameters. Attributes and bitsandbytes' class are kept."""
    for parameter in model.parameters():
        if is_placeholder(parameter):
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            cls = torch.nn.Parameter if isinstance(parameter, Placeholder) else type(parameter)
            new = make_parameter(cls, meta, parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, new)
