"""The plan of an export: the tensors to write, their dtypes, and the parameter elements that they come from."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import parameter_names
from hf_fsdp_recipes.distributed import warn_main
from hf_fsdp_recipes.errors import ExportError
from hf_fsdp_recipes.export.tensor_files import FilePlan
from hf_fsdp_recipes.loading.weight_mapping import TensorRange, WeightMapping, stored_ranges

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_PATTERN = "model{suffix}.safetensors"
ADAPTER_PATTERN = "adapter_model{suffix}.safetensors"


@dataclass(frozen=True)
class ShardExport:
    """This rank's part of one parameter: `count` elements from element `first` on, in row-major order."""

    name: str  # key in the model's state dict
    shape: tuple[int, ...]  # shape of the full parameter
    held_dtype: torch.dtype  # the dtype that `read` returns
    first: int
    count: int
    parts: list[TensorRange]  # the tensors of the files into which the parameter is split
    dtype: torch.dtype  # the dtype in the file
    read: Callable[[int, int], torch.Tensor]  # (start, count) -> values to write (1-D), from element `first + start` on


@dataclass(frozen=True)
class ExportPlan:
    """Everything that an export writes."""

    shards: list[ShardExport]  # this rank's parts; the same parameters in the same order on every rank
    model: "PreTrainedModel | None"  # determines the tensors' names in the files; may be on meta; None for an adapter
    pattern: str  # of file names: `{suffix}` becomes -00001-of-00002, or nothing if there is only one file
    write_assets: Callable[[Path, FilePlan], None]  # writes configs and tokenizer into a directory; rank 0 calls it
    base_directory: Path | None = None  # holds the config and, in a merge, base weights; verified before writing

    @property
    def is_adapter(self) -> bool:
        """Whether the files hold an adapter instead of a model."""
        return self.pattern == ADAPTER_PATTERN


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Convert the name of a floating-point dtype to the dtype, but keep a dtype or None. Raise an ExportError for other names."""
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ExportError(f"dtype is {dtype!r}. Use bfloat16, float16, float32 or None.")
        return found
    return dtype


def written_dtype(held: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is written; integer tensors keep their dtype."""
    return requested if requested is not None and held.is_floating_point else held


def split_parameters(model: "PreTrainedModel", shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[TensorRange]]:
    """Split parameters into the tensors that `save_pretrained` writes.

    A parameter is not split if it shares a stored tensor with other parameters or if the weight conversion mixes its rows. It
    then keeps transformers' own name, which `from_pretrained` and `load_model` accept. Rank 0 logs the number of such parameters.

    Raises:
        ExportError: a parameter cannot keep its name, because loading would convert it again; or two parameters have one name.
    """
    counts = Counter(parameter_names.in_base_model(name) for name in shapes)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ExportError(
            f"the model has {counts[repeated[0]]} versions of {repeated[0]}. Delete the other adapters with "
            f"model.delete_adapter, or export the adapter without merging."
        )
    parts: dict[str, list[TensorRange]] = {}
    reasons = {}
    for name, shape in shapes.items():
        try:
            parts[name] = stored_ranges(model, parameter_names.in_base_model(name), shape)
        except ValueError as error:
            reasons[name] = str(error)
    users = Counter(part.tensor for ranges in parts.values() for part in ranges)
    for name, ranges in parts.items():
        shared = [part.tensor for part in ranges if users[part.tensor] > 1]
        if shared:
            reasons[name] = f"{shared[0]} also holds other parameters"
    if reasons:
        mapping, names = WeightMapping(model), {parameter_names.in_base_model(name) for name in shapes}
        for name, reason in reasons.items():
            own = parameter_names.in_base_model(name)
            if not mapping.is_unchanged(own, names):
                raise ExportError(
                    f"{name} cannot be written shard by shard ({reason}). Gather the model with accelerator.get_state_dict "
                    f"and call save_pretrained."
                )
            parts[name] = [full_range(own, shapes[name])]
        warn_main(
            f"{len(reasons)} tensors are exported under transformers' own names, such as {next(iter(reasons))}, because "
            f"{next(iter(reasons.values()))}."
        )
    return {name: parts[name] for name in shapes}


def full_range(stored_name: str, shape: tuple[int, ...]) -> TensorRange:
    """Return the range that stores a full parameter as one tensor."""
    return TensorRange(stored_name, shape, 0, torch.Size(shape).numel())
