"""Placeholders are the parameters of a model until its weights are loaded.

A placeholder has the shape and dtype of its weight, but all its elements share one NaN in host
memory. Unlike meta tensors, placeholders have a device and distinct addresses, so PEFT, TRL,
Trainer, optimizers and Accelerate handle them like weights. A placeholder that is written to
becomes an ordinary weight, which is not loaded. Numbers computed from a placeholder are NaN, but a
comparison or a sort of them has a result that means nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import swap_tensors

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.upstream.torch_internals import make_parameter, run_on_plain_tensors
from hf_fsdp_recipes.upstream.transformers_internals import INITIALIZED

OFFLINE = "Change the model without FSDP, save it, and train the saved model"
NOT_LOADED = (
    "the model's weights are not loaded yet: they are loaded when the Trainer or Accelerator that "
    "trains the model shards it. Train first, or use from_pretrained for a model that is not "
    "trained, such as a reference model; LoRA needs none."
)
READ_TOO_EARLY = (
    "a weight is read or cast before it is loaded, for example by init_lora_weights='pissa' or "
    "'olora', or by DoRA. Use plain LoRA. Or, for DoRA: add the adapter without FSDP, save it, and "
    "add the saved one with PeftModel.from_pretrained. To cast the model, pass dtype to load_model."
)
IDENTITY = "_hf_fsdp_identity"  # the attribute of a placeholder with its `Identity`
SOURCE = "_hf_fsdp_source"  # the attribute of its data with the same
GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Methods that end like those that write to a tensor.
KEEPS_VALUES = ("requires_grad_", "detach_", "share_memory_")
CASTS = (
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
)


class Identity(NamedTuple):
    """Which weight a placeholder stands for. Its copies share it."""

    checkpoint: object  # the `Checkpoint` with its values
    names: list[str]  # in the model that was loaded; several if the weight is tied


class Placeholder(Parameter):
    """A parameter that takes no memory.

    Its copies, such as PEFT's `modules_to_save`, are placeholders too, and have the same names.
    """

    def __new__(cls, like: Tensor) -> "Placeholder":
        """Return a placeholder for a tensor on any device."""
        placeholder = make_parameter(cls, shared_nan(like.shape, like.dtype), like.requires_grad)
        placeholder.__dict__.update(like.__dict__)
        return placeholder

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
        """Refuse casts, and refuse to be sharded by anyone but `Loader`. Accept new values.

        PiSSA, OLoRA and DoRA cast a weight before they read it, but a placeholder has no values to
        read. `fully_shard` first asks whether a parameter is contiguous. `Loader` has turned the
        placeholders into meta parameters by then.
        """
        named: dict[str, Any] = kwargs or {}
        inputs = [*args, *named.values()]
        own = inputs[0]
        run = partial(run_on_plain_tensors, function, types, args, named)
        if not is_placeholder(own):
            return run()
        if function is Tensor.is_contiguous:
            raise LoadError(NOT_LOADED)
        if function in CASTS or (function is Tensor.to and isinstance(args[-1], torch.dtype)):
            raise LoadError(READ_TOO_EARLY)
        if function == GET_DATA:
            return make_data(run(), own)
        if function is Tensor.to:  # `Module.to` passes more after the dtype
            return cast(function, own, inputs[1:])
        if function == SET_DATA and getattr(inputs[1], SOURCE, None) is getattr(own, IDENTITY):
            value = shared_nan(own.shape, inputs[1].dtype)
            return run_on_plain_tensors(function, types, (own, value), {})
        if function == SET_DATA or is_in_place(function.__name__):
            delattr(own, IDENTITY)
            own.__class__ = Parameter
            own.data = torch.full_like(own, float("nan"))  # what is not written to stays unknown
        return run()


class Data(Tensor):
    """The `data` of a placeholder. It shares the placeholder's value, and takes no memory if cast.

    The attribute SOURCE has the placeholder's identity.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Callable,
        types: tuple,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if (function in CASTS or function is Tensor.to) and hasattr(args[0], SOURCE):
            return cast(function, args[0], [*args[1:], *(kwargs or {}).values()])
        return run_on_plain_tensors(function, types, args, kwargs or {})


def make_data(value: Any, source: Tensor) -> Tensor:
    """Return a tensor as the data of the placeholder that `source` is, or whose data it is."""
    data = value.as_subclass(Data)
    setattr(data, SOURCE, getattr(source, IDENTITY, None) or getattr(source, SOURCE))
    return data


def cast(function: Callable, source: Tensor, inputs: list) -> Tensor:
    """Return the data of a placeholder, cast by a method of tensors, without its memory."""
    value = function(one_value(source), *inputs)
    return make_data(value.expand(source.shape), source)


def is_in_place(name: str) -> bool:
    """Return whether a function of torch writes to its first argument."""
    is_method = name.endswith("_") and not name.startswith("__")
    return name == "__setitem__" or (is_method and name not in KEEPS_VALUES)


def shared_nan(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose elements all share a single NaN in host memory."""
    return torch.full((), float("nan"), dtype=dtype).expand(shape)


def one_value(placeholder: Tensor) -> Tensor:
    """Return the value that all elements of a placeholder share, as a tensor without dimensions."""
    return placeholder.detach().as_strided((), ())


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter is a placeholder. Its class may also be one of bitsandbytes."""
    return hasattr(parameter, IDENTITY)


def insert_placeholders(model: Module, checkpoint: object) -> None:
    """Replace a model's meta parameters with placeholders, and give all parameters their identity.

    As in `from_pretrained`, all of them are trained, even those that the model's class freezes, and
    the model's own methods do not initialize them again.
    """
    for buffer in model.buffers():
        setattr(buffer, INITIALIZED, True)
    for parameter, names in names_by_parameter(model).items():
        setattr(parameter, IDENTITY, Identity(checkpoint, names))
        setattr(parameter, INITIALIZED, True)
        if parameter.is_meta and type(parameter) is Parameter:
            parameter.requires_grad_(parameter.is_floating_point())
            swap_tensors(parameter, Placeholder(parameter))


def names_by_parameter(model: Module) -> dict[Parameter, list[str]]:
    """Return {parameter: its names in a model}, which are several if it is tied."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def names_in_checkpoint(model: Module, checkpoint: object) -> dict[str, list[str]]:
    """Return {name of a placeholder in a model: its names in the model that was loaded}.

    Raise a LoadError if a placeholder is of another model.
    """
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_placeholder(parameter):
            identity = getattr(parameter, IDENTITY)
            names[name] = identity.names
            if identity.checkpoint is not checkpoint:
                raise LoadError(
                    f"{name} is of another model from load_model. Combine models without FSDP, "
                    "save the result, and train the saved model."
                )
    return names


def move_to_meta(model: Module) -> None:
    """Replace a model's placeholders with meta parameters.

    Attributes and bitsandbytes' class are kept. Raise a LoadError if a placeholder has been
    changed, because the change would be lost.
    """
    for name, parameter in model.named_parameters():
        if is_placeholder(parameter):
            if parameter.numel() and not one_value(parameter).isnan():
                raise LoadError(
                    f"{name} was changed before it was loaded, and the change would be lost. "
                    f"{OFFLINE}."
                )
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            cls = Parameter if isinstance(parameter, Placeholder) else type(parameter)
            new = make_parameter(cls, meta, parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            swap_tensors(parameter, new)
