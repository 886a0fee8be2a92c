"""What an export writes: which tensors, in which dtype, from which elements of which parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import parameter_names
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, stored_ranges

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_PATTERN = "model{suffix}.safetensors"
ADAPTER_PATTERN = "adapter_model{suffix}.safetensors"


@dataclass(frozen=True)
class ShardExport:
    """This rank's part of one parameter.

    Attributes:
        name: key in the model's state dict.
        shape: shape of the full parameter.
        held_dtype: dtype that `read` returns.
        first, count: the elements that this rank writes, in the parameter's row-major order.
        parts: the stored tensors that the parameter becomes, as ranges of its elements.
        dtype: dtype in the file.
        read: `read(start, count)` returns `count` final values (1-D), starting `start` elements after `first`.
    """

    name: str
    shape: tuple[int, ...]
    held_dtype: torch.dtype
    first: int
    count: int
    parts: list[TensorRange]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class ExportPlan:
    """Everything that an export writes.

    Attributes:
        shards: this rank's parts; the same parameters in the same order on every rank.
        model: the transformers model, possibly on meta, whose conversions name the tensors; None for an adapter.
        pattern: file name with `{suffix}`.
        write_assets: writes configs and tokenizer into a directory, given the file plan; rank 0 calls it.
    """

    shards: list[ShardExport]
    model: "PreTrainedModel | None"
    pattern: str
    write_assets: Callable[[Path, FilePlan], None]

    @property
    def is_adapter(self) -> bool:
        """Whether the files hold an adapter instead of a model."""
        return self.pattern == ADAPTER_PATTERN


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating-point dtype given by name or as a dtype.

    Raises:
        ExportError: there is no floating-point dtype of that name.
    """
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ExportError(f"dtype is {dtype!r}. Use bfloat16, float16, float32 or None.")
        return found
    return dtype


def written_dtype(held: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is written in; integer tensors keep theirs."""
    return requested if requested is not None and held.is_floating_point else held


def split_parameter(model: "PreTrainedModel", name: str, shape: tuple[int, ...]) -> list[TensorRange]:
    """Split a parameter into the tensors that `save_pretrained` writes.

    Raises:
        ExportError: a stored tensor is not a range of the parameter's rows.
    """
    try:
        return stored_ranges(model, parameter_names.in_base_model(name), shape)
    except ValueError as error:
        raise ExportError(
            f"{name} cannot be written shard by shard ({error}). Gather the model with accelerator.get_state_dict and call "
            f"save_pretrained."
        ) from error


def full_range(stored_name: str, shape: tuple[int, ...]) -> TensorRange:
    """Return the range that stores a full parameter as one tensor."""
    return TensorRange(stored_name, shape, 0, torch.Size(shape).numel())
