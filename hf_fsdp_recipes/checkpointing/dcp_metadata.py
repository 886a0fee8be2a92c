"""Lists the tensors in a torch DCP (Distributed Checkpoint) directory, and compares them with a model's."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hf_fsdp_recipes.checkpointing.layout import METADATA_FILE
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.parameter_names import is_adapter
from hf_fsdp_recipes.patches.torch import load_metadata
from hf_fsdp_recipes.precision import format_dtype

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


class TensorFacts(NamedTuple):
    """Global shape and dtype of a tensor; `dtype` is None if it is unknown."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def __str__(self) -> str:
        """Return the shape and dtype as text, such as `(300, 32) float32`."""
        return f"{self.shape}{'' if self.dtype is None else ' ' + format_dtype(self.dtype)}"


Tensors = Mapping[str, TensorFacts]


def read_dcp_metadata(directory: Path) -> "Metadata":
    """Return a DCP directory's metadata without running pickled code; raise a CheckpointError if it cannot be read."""
    try:
        with (directory / METADATA_FILE).open("rb") as stream:
            return load_metadata(stream)
    except OSError as error:
        raise CheckpointError(
            f"{directory / METADATA_FILE} cannot be read: {error.strerror}. Use another checkpoint."
        ) from error


def stored_tensors(metadata: "Metadata", prefix: str) -> dict[str, TensorFacts]:
    """Return {name: shape and dtype} of the tensors whose names begin with `prefix.`; the keys omit this prefix."""
    return {
        name.removeprefix(f"{prefix}."): TensorFacts(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "properties") and name.startswith(f"{prefix}.")
    }


def describe_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, TensorFacts]:
    """Return {name: global shape and dtype} of a state dict's tensors, sharded or not."""
    return {name: TensorFacts(tuple(v.size()), v.dtype) for name, v in state.items() if hasattr(v, "dtype")}


def find_mismatch(stored: Tensors, model: Tensors, compare_names: bool = True) -> str | None:
    """Return how a checkpoint's tensors differ from a model's, as a clause for a message, or None if they match."""
    if (has_adapter := any(map(is_adapter, model))) != any(map(is_adapter, stored)):
        held, trained = ("all parameters", "an adapter") if has_adapter else ("an adapter", "all parameters")
        return f"holds {held}, but this run trains {trained}"
    for name, wanted in model.items():
        found = stored.get(name, wanted)
        if found.shape != wanted.shape or (found.dtype != wanted.dtype and None not in (found.dtype, wanted.dtype)):
            return f"has {name} as {found}, but in this run it is {wanted}"
    unused, missing = sorted(stored.keys() - model.keys()), sorted(model.keys() - stored.keys())
    if compare_names and unused:
        return f"has {len(unused)} tensors that this run's model lacks, such as {unused[0]}"
    if compare_names and missing:
        return f"lacks {len(missing)} tensors of this run's model, such as {missing[0]}"
    return None
