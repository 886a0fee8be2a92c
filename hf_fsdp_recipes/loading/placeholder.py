"""Placeholders are the parameters of a model until its weights are loaded.

A placeholder has the shape and dtype of its weight, but all its elements share one NaN in host
memory. Unlike meta tensors, placeholders have a device and distinct addresses, so PEFT, TRL,
Trainer, optimizers and Accelerate handle them like weights. Writing to a placeholder raises an
error. A result computed from a placeholder is NaN, never a plausible number.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import swap_tensors

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.upstream.torch_internals import make_parameter, run_on_plain_tensors

OFFLINE = "Change the model without FSDP, save it, and train the saved model"
NOT_LOADED = (
    "the model's weights are not loaded yet: they are loaded when the Trainer or Accelerator that "
    "trains the model shards it. Train first, or use from_pretrained for a model that is not "
    "trained, such as a reference model; LoRA needs none."
)
READ_TOO_EARLY = (
    "a weight is read before it is loaded, for example by init_lora_weights='pissa' or 'olora', "
    "or by DoRA. Use plain LoRA. Or: change the model without FSDP, save it, and train the saved "
    "model."
)
CASTS = (
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
)


class Placeholder(Parameter):
    """A parameter that takes no memory.

    Its copies, such as PEFT's `modules_to_save`, are placeholders too.
    """

    def __new__(cls, like: Tensor) -> "Placeholder":
        """Return a placeholder for a tensor on any device."""
        return make_parameter(cls, shared_nan(like.shape, like.dtype), like.requires_grad)

    def __deepcopy__(self, memo: dict) -> "Placeholder":
        """Return another placeholder. Torch's default copy would allocate the full tensor."""
        return memo.setdefault(id(self), Placeholder(self))

    @classmethod
    def __torch_function__(
        cls,
        function: Callable,
        types: tuple,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        """Refuse casts, and refuse to be sharded by anyone but `Loader`.

        PiSSA, OLoRA and DoRA cast a weight before they read it, but a placeholder has no values to
        read. `fully_shard` first asks whether a parameter is contiguous. `Loader` has turned the
        placeholders into meta parameters by then.
        """
        if function is Tensor.is_contiguous:
            raise LoadError(NOT_LOADED)
        # `Module.to` passes more after the dtype. It may cast, because it reads no values.
        if function in CASTS or (function is Tensor.to and isinstance(args[-1], torch.dtype)):
            raise LoadError(READ_TOO_EARLY)
        return run_on_plain_tensors(function, types, args, kwargs or {})


def shared_nan(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose elements all share a single NaN in host memory."""
    return torch.full((), float("nan"), dtype=dtype).expand(shape)


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter is a placeholder.

    Its class may also be that of bitsandbytes' packed weights. All elements are one then.
    """
    return isinstance(parameter, Placeholder) or (
        parameter.numel() > 1 and not any(parameter.stride())
    )


def insert_placeholders(model: Module) -> None:
    """Replace a model's meta parameters with placeholders.

    As in `from_pretrained`, all of them are trained, even those that the model's class freezes.
    """
    for parameter in model.parameters():
        if parameter.is_meta and type(parameter) is Parameter:
            parameter.requires_grad_(parameter.is_floating_point())
            swap_tensors(parameter, Placeholder(parameter))


def move_to_meta(model: Module) -> None:
    """Replace a model's placeholders with meta parameters.

    Attributes and bitsandbytes' class are kept.
    """
    for parameter in model.parameters():
        if is_placeholder(parameter):
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            cls = Parameter if isinstance(parameter, Placeholder) else type(parameter)
            new = make_parameter(cls, meta, parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            swap_tensors(parameter, new)
