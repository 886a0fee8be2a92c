"""Placeholders are the parameters of a model until its weights are loaded.

A placeholder has the shape and dtype of its weight, but all its elements share one NaN in host
memory. Unlike meta tensors, placeholders have a device and distinct addresses, so PEFT, TRL,
Trainer, optimizers and Accelerate handle them like weights. They can be copied, cast, tied, moved
to other modules and asked for their shape. One that is overwritten becomes an ordinary weight,
which is not loaded. What is computed from placeholders may only be overwritten, as PEFT does when
it loads a DoRA adapter. Everything that would read values raises a LoadError.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import swap_tensors

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.upstream.torch_internals import (
    ASK_FOR_COPY,
    make_parameter,
    run_on_plain_tensors,
)
from hf_fsdp_recipes.upstream.transformers_internals import INITIALIZED

OFFLINE = "Change the model without FSDP, save it, and train the saved model"
NOT_LOADED = (
    "the model's weights are not loaded yet: they are loaded when the Trainer or Accelerator that "
    "trains the model shards it. Train first, or use from_pretrained for a model that is not "
    "trained, such as a reference model; LoRA needs none."
)
READ_TOO_EARLY = (
    "a weight is read before it is loaded, which is when the Trainer or Accelerator shards the "
    "model. init_lora_weights='pissa' or 'olora', DoRA, trainable_token_indices and "
    "resize_token_embeddings read weights. Use plain LoRA. Or, for DoRA: add the adapter without "
    "FSDP, save it, and add the saved one with PeftModel.from_pretrained. For other changes: "
    f"{OFFLINE}."
)
IDENTITY = "_hf_fsdp_identity"  # the attribute of a placeholder with its `Identity`
ROUNDED = "_hf_fsdp_rounded"  # the attribute with the narrowest dtype to which it was cast
OWNER = "_hf_fsdp_owner"  # the attribute of a placeholder's `data`: the placeholder
GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Methods of tensors that end like those that change values.
KEEPS_VALUES = ("requires_grad_", "detach_", "share_memory_")
# Those that do not read old values. The functions of torch.nn.init do not either.
OVERWRITES = (
    "__setitem__",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
)
# Those whose result has the same values, perhaps rounded.
COPIES = ("to", "float", "double", "half", "bfloat16", "clone", "contiguous")
# Functions that use nothing of their later arguments but shape, dtype and device.
USES_NO_VALUES = (
    "to",
    "type_as",
    "view_as",
    "expand_as",
    "reshape_as",
    ASK_FOR_COPY,
)
# Functions whose results are no tensors, but have values of tensors.
READS_VALUES = (
    "item",
    "tolist",
    "numpy",
    "equal",
    "allclose",
    "is_nonzero",
    "__array__",
    "__bool__",
    "__complex__",
    "__contains__",
    "__dlpack__",
    "__float__",
    "__index__",
    "__int__",
    "__reduce_ex__",
)


class Identity(NamedTuple):
    """Which weight a placeholder stands for. Its copies share it."""

    checkpoint: object  # the `Checkpoint` with its values
    names: list[str]  # in the model that was loaded; several if the weight is tied


class Placeholder(Tensor):
    """A parameter that takes no memory, or a view of one.

    Copies of parameters, such as PEFT's `modules_to_save`, have the same identity. So has `data`,
    cast or not. Other views have none.
    """

    def __deepcopy__(self, memo: dict) -> Tensor:
        """Return another placeholder. Torch's default copy would allocate the full tensor."""
        return memo.setdefault(id(self), make_placeholder(self))

    @classmethod
    def __torch_function__(
        cls,
        function: Callable,
        types: tuple,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        """Accept what needs no values, and new values. Refuse everything else.

        `fully_shard` first asks whether a parameter is contiguous. That is refused, so nobody but
        `Loader` shards a placeholder. `Loader` has turned it into a meta parameter by then.
        """
        named: dict[str, Any] = kwargs or {}
        inputs = [*args, *named.values()]
        own = inputs[0]
        others = inputs[1:]
        name = function.__name__
        run = partial(run_on_plain_tensors, function, types)
        if isinstance(own, Placeholder) and name in COPIES:
            return copy_without_memory(own, lambda value: run((value, *args[1:]), named))
        is_changed = name.endswith("_") and not name.endswith("__") and name not in KEEPS_VALUES
        if any(isinstance(other, Placeholder) for other in others):
            if function == SET_DATA and is_same(own, others[0]):
                copy_identity(others[0], own)
                return run((own, shared_nan(own.shape, others[0].dtype)), {})
            if name in USES_NO_VALUES or (function == SET_DATA and isinstance(own, Computed)):
                return run(args, named)
            is_changed |= function == SET_DATA or name in OVERWRITES
        elif function == SET_DATA or name in OVERWRITES or is_initialization(function):
            make_ordinary(own)
            return run(args, named)
        elif function is Tensor.is_contiguous and hasattr(own, IDENTITY):
            raise LoadError(NOT_LOADED)
        if name not in READS_VALUES and not is_changed and isinstance(own, Tensor):
            with suppress(torch.linalg.LinAlgError):  # of NaN, which cannot be decomposed
                return without_values(function, run(args, named), own)
        raise LoadError(READ_TOO_EARLY)


class Computed(Placeholder):
    """What was computed from placeholders: NaN."""


def make_placeholder(like: Tensor) -> Tensor:
    """Return a placeholder with the shape, dtype and attributes of a tensor on any device."""
    cls = type(like) if isinstance(like, Placeholder) else Placeholder
    placeholder: Any = shared_nan(like.shape, like.dtype).as_subclass(cls)
    if isinstance(like, Parameter):
        placeholder = Parameter(placeholder, like.requires_grad)
    placeholder.__dict__.update(like.__dict__)
    placeholder.__dict__.pop(OWNER, None)
    return placeholder


def without_values(function: Callable, result: Any, own: Tensor) -> Any:
    """Return the result of a function of placeholders, whose first argument was `own`.

    Views are placeholders, and NaN is `Computed`. Factories such as `zeros_like` only use shape,
    dtype and device. Raise a LoadError if values were computed that hide NaN.
    """
    if isinstance(result, (tuple, list)):
        return type(result)([without_values(function, part, own) for part in result])
    name = function.__name__
    is_new = name.startswith("new_") or name.endswith("like")
    if result is own or is_new or not isinstance(result, Tensor):
        return result
    if result.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
        if not result.isnan().all():
            raise LoadError(READ_TOO_EARLY)
        return result.detach().as_subclass(Computed)
    if not isinstance(own, Placeholder):
        return result
    view = result.as_subclass(type(own))
    if (function == GET_DATA or function is Tensor.detach) and hasattr(own, IDENTITY):
        setattr(view, OWNER, own)
        copy_identity(own, view)
    return view


def copy_without_memory(own: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a placeholder as `copy` casts, moves or copies its value."""
    value = one_value(own)
    converted = copy(value)
    if converted is value:
        return own
    placeholder = converted.expand(own.shape).as_subclass(
        type(own) if is_placeholder(own) else Computed
    )
    copy_identity(own, placeholder)
    if converted.itemsize < getattr(own, ROUNDED, own.dtype).itemsize:
        setattr(placeholder, ROUNDED, converted.dtype)
    if not converted.isnan():
        raise LoadError(READ_TOO_EARLY)
    return placeholder


def copy_identity(source: Tensor, target: Tensor) -> None:
    """Let a placeholder stand for the same weight as another, rounded in the same way."""
    for name in (IDENTITY, ROUNDED):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def is_initialization(function: Callable) -> bool:
    """Return whether a function is one of torch.nn.init."""
    return getattr(function, "__module__", None) == torch.nn.init.__name__


def is_same(own: Any, cast: Any) -> bool:
    """Return whether `cast` is a placeholder, or its data, in some dtype."""
    return is_placeholder(own) and getattr(own, IDENTITY) is getattr(cast, IDENTITY, None)


def make_ordinary(own: Any) -> None:
    """Give a placeholder memory of its own, because it is about to be overwritten.

    A placeholder's `data` shares this memory. What is not written to stays NaN, which is refused
    when the model is sharded. Raise a LoadError for other views.
    """
    if hasattr(own, IDENTITY):
        delattr(own, IDENTITY)
    elif not isinstance(own, Computed):
        raise LoadError(f"a part of a weight is changed before it is loaded. {OFFLINE}.")
    own.__class__ = Parameter if isinstance(own, Parameter) else Tensor
    owner = getattr(own, OWNER, None)
    if owner is None:
        own.data = torch.full_like(own, float("nan"))
    else:
        if hasattr(owner, IDENTITY):
            make_ordinary(owner)
        own.data = owner.data


def shared_nan(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose elements all share a single NaN in host memory."""
    return torch.full((), float("nan"), dtype=dtype).expand(shape)


def one_value(placeholder: Tensor) -> Tensor:
    """Return the value that all elements of a placeholder share, as a tensor without dimensions."""
    plain = run_on_plain_tensors(Tensor.detach, (), (placeholder,), {})
    return plain.as_strided((), ())


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter is a placeholder. Its class may also be one of bitsandbytes."""
    return hasattr(parameter, IDENTITY)


def insert_placeholders(model: Any, checkpoint: object) -> None:
    """Replace a model's meta parameters with placeholders, and give all parameters their identity.

    As in `from_pretrained`, parameters are trained unless the model's own initialization freezes
    them. It changes no values, because all of them count as initialized.
    """
    identities = names_by_parameter(model)
    for tensor in [*identities, *model.buffers()]:
        setattr(tensor, INITIALIZED, True)
    for parameter in identities:
        parameter.requires_grad_(type(parameter) is Parameter and parameter.is_floating_point())
    model.initialize_weights()
    for parameter, names in identities.items():
        setattr(parameter, IDENTITY, Identity(checkpoint, names))
        if parameter.is_meta:
            swap_tensors(parameter, make_placeholder(parameter))


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
