"""Describes which elements of a parameter each rank holds.

Under any sharding, a rank holds elements [first, first + count) of a parameter in row-major order: full rows under FSDP2, any
range under FSDP1. Loading reads those ranges and exporting writes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_recipes.loading.weight_mapping import TensorRange


@dataclass(frozen=True)
class ShardTarget:
    """This rank's part of a parameter or buffer, and where the full tensor is in the checkpoint."""

    name: str
    ranges: Sequence[TensorRange]  # stored ranges that together form the full tensor, in row-major order
    stored_dtype: torch.dtype  # dtype in the checkpoint, in which elements are read and sent
    dtype: torch.dtype  # dtype of `local`
    first: int  # position of `local`'s first element in the full tensor, in row-major order
    local: torch.Tensor  # this rank's elements, 1-D and contiguous, on the device that holds the shard

    @property
    def num_elements(self) -> int:
        """Number of elements of the full tensor."""
        return sum(part.num_elements for part in self.ranges)


@dataclass(frozen=True)
class Slice:
    """This rank's part of one parameter or buffer."""

    name: str  # without the wrappers of FSDP1, activation checkpointing and torch.compile
    shape: tuple[int, ...]  # shape of the full parameter
    dtype: torch.dtype
    first: int  # position of the slice's first element in the parameter, in row-major order
    values: torch.Tensor  # this rank's elements, 1-D; empty if this rank holds none or only a replica


def row_range(shape: Sequence[int], num_shards: int, shard_rank: int) -> tuple[int, int]:
    """Return (first element, number of elements) of one rank's rows. The rows are split as in `torch.chunk` and FSDP2."""
    num_rows = shape[0] if shape else 1
    row_elements = torch.Size(shape[1:]).numel()
    rows_per_shard = -(-num_rows // num_shards)
    first = min(shard_rank * rows_per_shard, num_rows)
    return first * row_elements, (min(first + rows_per_shard, num_rows) - first) * row_elements


def find_shard(tensor: DTensor) -> tuple[int, int, bool] | None:
    """Return (first element, number of elements, is replica) of this rank's shard.

    If several ranks hold the same shard, all but one of them hold a replica. Returns None if the tensor is sharded on a
    dimension other than the first, or over several dimensions of the mesh.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    sharded = [dim for dim, placement in enumerate(tensor.placements) if placement == Shard(0)]
    replicated = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    if len(sharded) > 1 or len(sharded) + len(replicated) != len(tensor.placements):
        return None
    is_replica = any(coordinate[dim] != 0 for dim in replicated)
    if not sharded:
        return 0, tensor.numel(), is_replica
    return *row_range(tensor.shape, tensor.device_mesh.size(sharded[0]), coordinate[sharded[0]]), is_replica
