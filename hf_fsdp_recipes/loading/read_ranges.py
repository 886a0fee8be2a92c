"""Reads ranges of a parameter's elements from a checkpoint's files into this rank's shard. No collectives."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from hf_fsdp_recipes.loading.safetensors_index import ByteRange, Prefetcher, SafetensorsIndex
from hf_fsdp_recipes.loading.shard_layout import ShardTarget
from hf_fsdp_recipes.loading.weight_mapping import TensorRange
from hf_fsdp_recipes.metrics import progress

PROGRESS_TITLE = "load weights"
READ_BYTES = 2 * 1024 * 1024  # per read; fits in a core's cache for the cast


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as 1-D uint8 without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def byte_ranges(
    index: SafetensorsIndex, ranges: Sequence[TensorRange], first: int = 0, count: int | None = None
) -> Iterator[ByteRange]:
    """Yield the byte ranges of elements [first, first + count) of a parameter, by default of all elements."""
    remaining = sum(part.num_elements for part in ranges) - first if count is None else count
    skip = first
    for part in ranges:
        if skip >= part.num_elements:
            skip -= part.num_elements
            continue
        if not remaining:
            return
        tensor = index.tensors[part.tensor]
        length = min(part.num_elements - skip, remaining)
        yield tensor, (part.start + skip) * tensor.dtype.itemsize, length * tensor.dtype.itemsize
        remaining, skip = remaining - length, 0


def read_elements(index: SafetensorsIndex, ranges: Sequence[TensorRange], first: int, out: torch.Tensor) -> None:
    """Fill `out` (1-D, CPU, in the stored dtype) with a parameter's elements, starting at `first`."""
    buffer, filled = as_bytes(out), 0
    for tensor, start, num_bytes in byte_ranges(index, ranges, first, out.numel()):
        index.read_into(buffer[filled : filled + num_bytes], tensor, start)
        filled += num_bytes


def fill_shard(target: ShardTarget, index: SafetensorsIndex, shard_rank: int, start: int, length: int) -> None:
    """Read and cast `length` elements of this rank's shard, starting at element `start` of the shard."""
    first = target.shard_ranges[shard_rank][0] + start
    step = READ_BYTES // target.stored_dtype.itemsize
    for offset in range(0, length, step):
        local = target.local[start + offset : start + min(offset + step, length)]
        if local.device.type == "cpu" and local.dtype == target.stored_dtype:
            read_elements(index, target.ranges, first + offset, local)
        else:
            staging = torch.empty(local.numel(), dtype=target.stored_dtype)
            read_elements(index, target.ranges, first + offset, staging)
            local.copy_(staging)


def read_direct(targets: Sequence[ShardTarget], index: SafetensorsIndex, shard_rank: int) -> None:
    """Fill all of this rank's shards from the files. Any rank may call this."""
    sizes = [target.shard_ranges[shard_rank][1] * target.stored_dtype.itemsize for target in targets]

    def read(target: ShardTarget) -> None:
        fill_shard(target, index, shard_rank, 0, target.shard_ranges[shard_rank][1])

    prefetcher = Prefetcher(
        index, (part for t in targets for part in byte_ranges(index, t.ranges, *t.shard_ranges[shard_rank]))
    )
    with ThreadPoolExecutor(max_workers=_num_readers()) as pool, progress.bar(sum(sizes), PROGRESS_TITLE) as bar:
        for num_bytes, _ in zip(sizes, pool.map(read, targets), strict=True):
            prefetcher.advance(num_bytes)
            bar.update(num_bytes)


def _num_readers() -> int:
    """Return 2 reading threads if each rank has two cores, else 1, because reading cached files keeps a core busy."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2, max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
