"""Describes which elements of a parameter each rank holds.

Under any sharding, a rank holds elements [first, first + count) of a parameter in row-major order: full rows under FSDP2, any
range under FSDP1. Loading reads those ranges and exporting writes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.weight_mapping import TensorRange

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class ShardTarget:
    """The local shard of one parameter, and where to load it from."""

    name: str  # the parameter's
    ranges: Sequence[TensorRange]  # that make up the full parameter, in row-major order
    stored_dtype: torch.dtype  # the checkpoint's, in which bytes are read and sent
    dtype: torch.dtype  # the parameter's
    shard_ranges: Sequence[tuple[int, int]]  # by shard rank: (first element, number of elements) of the full parameter
    local: torch.Tensor  # this rank's shard, 1-D and contiguous, on its device
    is_packed: bool = False  # holds 4-bit weights, which are quantized before they are sent


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that parameters are sharded over, and the replicas of their shards."""

    ranks: Sequence[int]  # of the first replica (global rank 0's), in shard order
    shard_rank: int  # index of this rank's shard
    is_first_replica: bool = True  # whether this rank is one of `ranks`
    replicate_group: dist.ProcessGroup | None = None  # ranks with the same shard, first replica first; None if only one
    group: dist.ProcessGroup | None = None  # over `ranks`; None for the default group


@dataclass(frozen=True)
class Slice:
    """This rank's part of one parameter or buffer."""

    name: str  # without the wrappers of FSDP1, activation checkpointing and torch.compile
    shape: tuple[int, ...]  # of the full parameter
    dtype: torch.dtype
    first: int  # position of the slice in the parameter, in row-major order
    values: torch.Tensor  # this rank's elements, 1-D; empty if it holds no elements or only a replica


def row_range(shape: Sequence[int], num_shards: int, shard_rank: int) -> tuple[int, int]:
    """Return (first element, number of elements) of one rank's rows, split as `torch.chunk` and FSDP2 do."""
    num_rows = shape[0] if shape else 1
    row_elements = torch.Size(shape[1:]).numel()
    rows_per_shard = -(-num_rows // num_shards)
    first = min(shard_rank * rows_per_shard, num_rows)
    return first * row_elements, (min(first + rows_per_shard, num_rows) - first) * row_elements


def find_shard_group(mesh: "DeviceMesh", placements: Sequence["Placement"]) -> ShardGroup:
    """Return the shard group of a DTensor; raise a LoadError unless it is sharded on dimension 0, in full or hybrid."""
    from torch.distributed.tensor import Shard

    sharded = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
    replicated = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    is_supported = len(sharded) == 1 and placements[sharded[0]] == Shard(0) and len(replicated) <= 1
    if not is_supported or len(sharded) + len(replicated) != mesh.ndim:
        raise LoadError(
            f"parameters have placements {tuple(placements)}; only full and hybrid sharding on dimension 0 are supported. Remove "
            f"tensor, context and expert parallelism from the Accelerate config."
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    is_first_replica = not replicated or coordinate[replicated[0]] == 0
    first_replica = mesh.mesh.select(replicated[0], 0) if replicated else mesh.mesh
    has_replicas = replicated and mesh.size(replicated[0]) > 1
    return ShardGroup(
        ranks=first_replica.flatten().tolist(),
        shard_rank=coordinate[sharded[0]],
        is_first_replica=is_first_replica,
        replicate_group=mesh.get_group(replicated[0]) if has_replicas else None,
        group=mesh.get_group(sharded[0]) if is_first_replica else None,
    )
