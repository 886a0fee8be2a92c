"""Sends rows (dim 0) between a rank that has a full weight and the ranks that have its shards."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_fsdp_recipes import distributed

FSDP_PLACEMENTS = ((Shard(0),), (Replicate(), Shard(0)))  # full and hybrid sharding


def local_part(value: Any) -> Any:
    """Return this rank's rows of a DTensor, or any other value itself, without a copy."""
    return value.to_local() if isinstance(value, DTensor) else value


def divide(full: Tensor, ranks: Sequence[int]) -> dict[int, Tensor]:
    """Divide a weight as `fully_shard` does: {rank: its rows}. The last ranks may have none."""
    parts = zip(ranks, full.chunk(len(ranks)), strict=False)
    return {rank: part for rank, part in parts if part.numel()}


def start_to_scatter(
    full: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], object]:
    """Start to copy one weight from rank 0 into the shards of the first replica. Collective.

    `full` is the weight on rank 0 and None on the other ranks. `dtype` and `device` are its own. If
    it is None on rank 0 too, uninitialized memory is sent. Returns a function that waits until this
    rank's shard is filled and its sends are complete.
    """
    shard = local_part(target)
    if full is None and (distributed.is_main() or not isinstance(target, DTensor)):
        full = torch.empty(target.shape, dtype=dtype, device=device)
    if not isinstance(target, DTensor):  # all ranks get all rows
        dist.broadcast(full, 0)  # type: ignore[arg-type]  # never None here
        return partial(shard.copy_, full)
    mesh = target.device_mesh
    ranks = mesh.mesh.flatten()[: mesh.shape[-1]].tolist()  # the first replica, rank 0 first
    operations = []
    # A rank without rows, or of another replica, which gets its rows at the end, does nothing.
    rows = shard
    if full is not None:
        parts = divide(full, ranks)
        rows = parts.pop(0, shard)
        operations = [dist.P2POp(dist.isend, part, rank) for rank, part in parts.items()]
    elif dist.get_rank() in ranks and shard.numel():
        if shard.dtype != dtype or shard.device != device:
            rows = torch.empty(shard.shape, dtype=dtype, device=device)
        operations = [dist.P2POp(dist.irecv, rows, 0)]
    works = dist.batch_isend_irecv(operations) if operations else []
    if full is not None:
        shard.copy_(rows)  # meanwhile, the other rows are sent

    def finish() -> None:  # on rank 0, its use of `full` keeps the weight alive while it is sent
        for work in works:
            work.wait()
        if full is None:
            shard.copy_(rows)  # does nothing if they were received in place

    return finish


def gather(
    value: Tensor,
    dtype: torch.dtype,
    writer: int,
) -> Tensor | None:
    """Return the full weight on rank `writer`. Other ranks may get None.

    Collective if `value` is a DTensor.
    """
    value = value.to(dtype)
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    device_type = mesh.device_type
    if value.placements not in FSDP_PLACEMENTS:
        # The shards may be offloaded to the CPU.
        return value.to(device_type).full_tensor()  # type: ignore[attr-defined]  # still a DTensor
    if not distributed.can_send(device_type):
        device_type = "cpu"
    ranks = dist.get_process_group_ranks(mesh.get_group(-1))  # with HSDP, those of this replica
    if writer not in ranks:
        return None
    rows = value.to_local().to(device_type).contiguous()
    full = None
    operations = []
    if dist.get_rank() == writer:
        full = rows.new_empty(value.shape)
        parts = divide(full, ranks)
        parts.pop(writer, rows).copy_(rows)
        operations = [dist.P2POp(dist.irecv, part, rank) for rank, part in parts.items()]
    elif rows.numel():
        operations = [dist.P2POp(dist.isend, rows, writer)]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return full
