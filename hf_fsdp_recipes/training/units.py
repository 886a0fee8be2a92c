"""Lets FSDP2 ranks train what one process would train, where a model uses its weights unusually.

FSDP2 sums a weight's gradient over the ranks only if the weight is used while the FSDP unit that
holds it runs its forward pass.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Module

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import RecipeError

# An attribute of a model that has been changed already.
MARK = "_hf_fsdp_trains_like_one_process"
# A method that the units of a trained output head get.
GATHER = "_hf_fsdp_gather_for_loss"
# A method of units that torch 2.13 has introduced.
REDUCE_UNUSED = "set_reduce_scatter_unused_params"


def train_like_one_process(model: Module) -> None:
    """Let the ranks train what one process would train on the rows of all ranks.

    - FSDP gathers a trained output head for losses that read its weight without calling it.
    - If only some ranks use a weight, such as that of an expert, its gradient is zero on the others
      instead of missing. Otherwise, torch would add up gradients of different weights, or fail.
    - Trainer again finds the model's class by its name, so label smoothing shifts the labels.
    - If a loss gathers any other weight itself, FSDP does not sum the gradient, and a note says so.
    - A batch in which only some ranks have images is an error: gloo would abort, and NCCL hang.

    Every rank calls this with a model that FSDP2 has sharded. A second call changes nothing. Not a
    collective.

    Raises:
        RecipeError: on every rank, while a batch is trained.
    """
    units = units_of(model)
    if not units or hasattr(units[0], MARK):
        return
    root = units[0]  # torch.compile may have wrapped it
    setattr(root, MARK, True)
    type(root).__name__ = type(root).__name__.removeprefix("FSDP")  # `fully_shard` adds it
    gather_head_for_loss(root)
    note_gradients(model)
    for unit in units[1:]:
        reduce_unused_weights(unit)
    if getattr(getattr(root, "config", None), "sub_configs", None):
        # The root may hold a part of an encoder, which text does not use. Its gradient is missing
        # on all ranks then, as in one process.
        root.register_forward_pre_hook(refuse_uneven_images, with_kwargs=True)
    elif hasattr(root, REDUCE_UNUSED):
        reduce_unused_weights(root)


def units_of(model: Module) -> list:
    """Return the FSDP units of a model, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gather_head_for_loss(model: Any) -> None:
    """Let FSDP gather a trained output head that TRL's loss reads without calling it.

    The loss would gather the weight itself, and the ranks would not sum the gradients of a head
    that is a unit of its own. Accelerate makes it one in PEFT models, in image-text models, and in
    models whose final norm it does not find. So the backbone's output passes through a method of
    the head's unit that changes nothing. FSDP then gathers the head for the loss. In the backward
    pass, it sums the head's gradient, and frees the head.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    head = getattr(base, "get_output_embeddings", lambda: None)()
    if head is None:
        return
    if any("Norm" in type(unit).__name__ for unit in units_of(model)):
        return  # the final norm is in one unit with the head, and gathers it
    units = units_of(head)
    for unit in units:
        setattr(unit, GATHER, PassThrough.apply)
        register_fsdp_forward_method(unit, GATHER)
        unit.set_reshard_after_forward(False, recurse=False)

    @torch.compiler.disable
    def gather(backbone: Module, inputs: object, output: Any) -> None:
        if getattr(output, "last_hidden_state", None) is None:
            return  # a whole model without a backbone, which calls its head
        for unit in units:
            output.last_hidden_state = getattr(unit, GATHER)(output.last_hidden_state)

    if any(parameter.requires_grad for parameter in head.parameters()):
        base.base_model.register_forward_hook(gather)


class PassThrough(torch.autograd.Function):
    """Returns its input without a copy, but not as a view, about which FSDP would warn."""

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:
        """Return the input."""
        return hidden.detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient


def reduce_unused_weights(unit: Any) -> None:
    """Let a unit also reduce the gradients of weights that this rank does not use, as zeros.

    A unit that does not run reduces none.
    """
    if hasattr(unit, REDUCE_UNUSED):
        unit.register_forward_pre_hook(lambda *_: getattr(unit, REDUCE_UNUSED)(True, recurse=False))
    else:  # before torch 2.13
        unit.register_full_backward_hook(add_zero_gradients)


def add_zero_gradients(unit: Module, *gradients: object) -> None:
    """Give each gathered weight of a unit a gradient. This runs before the unit's own backward."""
    for weight in unit.parameters():
        if weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def note_gradients(model: Module) -> None:
    """Print a note when autograd first computes the gradient of a shard.

    FSDP sets the gradients of shards itself. So a loss has gathered the weight then.
    """
    handles: list = []

    def note(name: str, gradient: Tensor) -> None:
        while handles:
            handles.pop().remove()
        distributed.print_main(
            f"note: {name} is used outside of the forward pass of its FSDP unit, so FSDP does not "
            "sum this gradient over the ranks. A penalty on weights needs no sum. But in a loss of "
            "rows, each rank trains its part of the weight on its own rows only: call the module."
        )

    for name, parameter in model.named_parameters():
        if (
            parameter.requires_grad
            and isinstance(parameter, DTensor)
            and parameter.device_mesh.size() > 1
        ):
            handles.append(parameter.register_hook(partial(note, name)))


@torch.compiler.disable
def refuse_uneven_images(model: Module, inputs: object, named_inputs: dict) -> None:
    """Raise an error if only some ranks have images, video or audio. Collective.

    The ranks gather the weights of an encoder together, so all of them have to call it.
    """
    tensors = filter(torch.is_tensor, named_inputs.values())
    numbers = distributed.gather(sum(map(torch.is_floating_point, tensors)))
    if len(set(numbers)) > 1:
        raise RecipeError(
            "only some ranks have images, video or audio in a batch: the ranks have "
            f"{numbers} such inputs. Give every row one, such as a blank image."
        )
