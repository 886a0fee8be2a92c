"""Reads ranges of a parameter's elements from a checkpoint's files into this rank's shard. No collectives."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch

from hf_fsdp_recipes.device_copies import Upload
from hf_fsdp_recipes.environment import num_cores
from hf_fsdp_recipes.loading.safetensors_index import ByteRange, Prefetcher, SafetensorsIndex
from hf_fsdp_recipes.loading.shard_layout import ShardTarget
from hf_fsdp_recipes.loading.weight_mapping import TensorRange
from hf_fsdp_recipes.metrics import progress

PROGRESS_TITLE = "load weights"
MAX_READERS = 4
READ_BYTES = 2 * 1024 * 1024  # bytes per read; few enough to be still in a core's cache when they are cast


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as 1-D uint8 without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def byte_ranges(
    index: SafetensorsIndex, ranges: Sequence[TensorRange], first: int = 0, count: int | None = None
) -> Iterator[ByteRange]:
    """Yield the byte ranges in the files that hold elements [first, first + count) of a parameter; by default, all elements."""
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
    read_bytes(index, ranges, first, out.numel(), as_bytes(out))


def read_bytes(
    index: SafetensorsIndex, ranges: Sequence[TensorRange], first: int, count: int, buffer: torch.Tensor
) -> None:
    """Fill a buffer (1-D uint8, CPU) with the bytes of elements [first, first + count) of a parameter."""
    filled = 0
    for tensor, start, num_bytes in byte_ranges(index, ranges, first, count):
        index.read_into(buffer[filled : filled + num_bytes], tensor, start)
        filled += num_bytes


def read_direct(targets: Sequence[ShardTarget], index: SafetensorsIndex) -> list[torch.Tensor | None]:
    """Fill all of this rank's shards from the files. Any rank may call this.

    Returns the sum of each shard in host memory, for the search for NaN: summing the values while they are in a core's cache is
    faster than reading them again. It is None for shards on an accelerator, which are summed later, with one kernel each.
    """
    if not targets:
        return []
    sizes = [target.local.numel() * target.stored_dtype.itemsize for target in targets]
    num_readers = count_readers()
    uploads: SimpleQueue[Upload] = SimpleQueue()
    for _ in range(num_readers):
        uploads.put(Upload(targets[0].local.device, READ_BYTES))

    def read(target: ShardTarget) -> torch.Tensor | None:
        upload = uploads.get()
        try:
            return _fill_shard(target, index, upload)
        finally:
            uploads.put(upload)

    prefetcher = Prefetcher(
        index, (part for t in targets for part in byte_ranges(index, t.ranges, t.first, t.local.numel()))
    )
    with ThreadPoolExecutor(num_readers) as pool, progress.bar(sum(sizes), PROGRESS_TITLE) as bar:
        sums = []
        for num_bytes, total in zip(sizes, pool.map(read, targets), strict=True):
            sums.append(total)
            prefetcher.advance(num_bytes)
            bar.update(num_bytes)
    while not uploads.empty():
        uploads.get().finish()
    return sums


def _fill_shard(target: ShardTarget, index: SafetensorsIndex, upload: Upload) -> torch.Tensor | None:
    """Read this rank's shard and cast it, READ_BYTES at a time. Returns the sum that `read_direct` describes."""
    total: torch.Tensor | None = None
    step = READ_BYTES // target.stored_dtype.itemsize
    for start in range(0, target.local.numel(), step):
        local = target.local[start : start + step]
        staging = upload.buffer(local.numel() * target.stored_dtype.itemsize)
        read_elements(index, target.ranges, target.first + start, staging.view(target.stored_dtype))
        with upload.uploaded(staging) as values:
            local.copy_(values.view(target.stored_dtype))
            if local.device.type == "cpu" and local.itemsize > 1:  # torch cannot add float8 values
                total = local.sum() if total is None else total + local.sum()
    return total


def count_readers(num_reading_ranks: int | None = None) -> int:
    """Return how many threads should read: up to 4, which keep storage busy, but at most this rank's share of the cores.

    `num_reading_ranks` is how many ranks of this node read, and so share its cores; by default, all of them do.
    """
    num_ranks = num_reading_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MAX_READERS, max(1, num_cores() // num_ranks))
