"""Distributes a checkpoint from global rank 0, the only rank that reads, to the shards of all ranks.

Bytes are sent in buckets, in the checkpoint's dtype, and cast on arrival. Rank 0 reads one bucket ahead, so no rank holds
more than two buckets beyond its shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_fsdp_recipes.loading.read_ranges import PROGRESS_TITLE, as_bytes, byte_ranges, fill_shard, read_elements
from hf_fsdp_recipes.loading.safetensors_index import Prefetcher, SafetensorsIndex
from hf_fsdp_recipes.loading.shard_layout import ShardGroup, ShardTarget
from hf_fsdp_recipes.loading.verify import Checksums
from hf_fsdp_recipes.metrics import progress

BUCKET_BYTES = 32 * 1024 * 1024  # over all ranks of the shard group


@dataclass(frozen=True)
class _Entry:
    """Elements [start, start + length) of every rank's shard of one target."""

    target: ShardTarget
    start: int
    length: int

    def range(self, shard_rank: int) -> tuple[int, int]:
        """Return (first element of the full parameter, number of elements) for one rank."""
        first, count = self.target.shard_ranges[shard_rank]
        return first + self.start, max(0, min(count - self.start, self.length))

    def num_bytes(self, shard_rank: int) -> int:
        return self.range(shard_rank)[1] * self.target.stored_dtype.itemsize


_Bucket = Sequence[_Entry]


@torch.no_grad()
def scatter(
    targets: Sequence[ShardTarget], index: SafetensorsIndex | None, group: ShardGroup, checksums: Checksums
) -> None:
    """Fill the shards of all ranks from a checkpoint that only global rank 0 reads.

    Collective: every rank must call this, with the same targets in the same order.

    Args:
        targets: the parameters, in the order of their bytes in the files, all sharded over the same group.
        index: the checkpoint on global rank 0; None elsewhere.
        group: how the parameters are sharded and replicated.
        checksums: rank 0 adds a checksum of what it reads for each shard.
    """
    if targets and index is not None:
        _send_all(targets, index, group, checksums)
    elif targets:
        _receive_all(targets, group)


def _shard_bytes(num_shards: int) -> int:
    """Return the most bytes of one bucket for one shard."""
    return max(BUCKET_BYTES // num_shards, 64)


def _buckets(targets: Sequence[ShardTarget], num_shards: int) -> Iterator[_Bucket]:
    """Split the targets into buckets of at most BUCKET_BYTES over all shards; the same on every rank."""
    bucket: list[_Entry] = []
    free = budget = _shard_bytes(num_shards)
    for target in targets:
        item_bytes = target.stored_dtype.itemsize
        longest = max(count for _, count in target.shard_ranges)
        start = 0
        while start < longest:
            if free < item_bytes:
                yield bucket
                bucket, free = [], budget
            length = min(longest - start, free // item_bytes)
            bucket.append(_Entry(target, start, length))
            start, free = start + length, free - length * item_bytes
    if bucket:
        yield bucket


def _send_all(targets: Sequence[ShardTarget], index: SafetensorsIndex, group: ShardGroup, checksums: Checksums) -> None:
    staged_buckets = _stage(targets, index, group, checksums)
    total_bytes = sum(count * target.stored_dtype.itemsize for target in targets for _, count in target.shard_ranges)
    prefetcher = Prefetcher(index, (part for target in targets for part in byte_ranges(index, target.ranges)))
    with ThreadPoolExecutor(max_workers=1) as reader, progress.bar(total_bytes, PROGRESS_TITLE) as bar:
        upcoming = reader.submit(next, staged_buckets, None)
        while (staged := upcoming.result()) is not None:
            bucket, buffers = staged
            device = bucket[0].target.local.device
            requests = _exchange(dist.isend, {group.ranks[r]: b.to(device) for r, b in buffers.items()}, group)
            upcoming = reader.submit(next, staged_buckets, None)
            own = _fill_own(bucket, index, group, checksums)
            _send_to_replicas(own, group)
            _wait(requests)
            num_bytes = sum(entry.num_bytes(r) for entry in bucket for r in range(len(group.ranks)))
            prefetcher.advance(num_bytes)
            bar.update(num_bytes)


def _stage(
    targets: Sequence[ShardTarget], index: SafetensorsIndex, group: ShardGroup, checksums: Checksums
) -> Iterator[tuple[_Bucket, dict[int, torch.Tensor]]]:
    """Yield each bucket with a byte buffer for each other rank that has elements in it."""
    others = [r for r in range(len(group.ranks)) if r != group.shard_rank]
    # Reuse the memory of two buckets, because page faults on new memory cost more than reading.
    memory = torch.empty((2, len(others), _shard_bytes(len(group.ranks))), dtype=torch.uint8)
    for number, bucket in enumerate(_buckets(targets, len(group.ranks))):
        buffers = {}
        for row, shard_rank in zip(memory[number % 2], others, strict=True):
            num_bytes = sum(entry.num_bytes(shard_rank) for entry in bucket)
            if num_bytes:
                buffers[shard_rank] = row[:num_bytes]
                _read_bucket(bucket, buffers[shard_rank], index, shard_rank)
            _add_checksums(checksums, bucket, shard_rank, index)
        yield bucket, buffers


def _read_bucket(bucket: _Bucket, buffer: torch.Tensor, index: SafetensorsIndex, shard_rank: int) -> None:
    for entry, part in _parts(bucket, buffer, shard_rank):
        first, count = entry.range(shard_rank)
        offset = 0
        for tensor, start, num_bytes in byte_ranges(index, entry.target.ranges, first, count):
            index.read_into(part[offset : offset + num_bytes], tensor, start)
            offset += num_bytes


def _add_checksums(checksums: Checksums, bucket: _Bucket, shard_rank: int, index: SafetensorsIndex) -> None:
    """Add checksums of one rank's shards of the parameters that begin in a bucket. Rereads them, in full or a sample."""
    for target in (entry.target for entry in bucket if entry.start == 0):
        first, count = target.shard_ranges[shard_rank]
        count = checksums.num_covered(count)
        step = BUCKET_BYTES // target.stored_dtype.itemsize
        for start in range(0, count, step):
            elements = torch.empty(min(step, count - start), dtype=target.stored_dtype)
            read_elements(index, target.ranges, first + start, elements)
            checksums.add(target.name, shard_rank, start, elements.to(target.dtype))


def _parts(bucket: _Bucket, buffer: torch.Tensor, shard_rank: int) -> Iterator[tuple[_Entry, torch.Tensor]]:
    """Split one rank's byte buffer into the entries of a bucket."""
    offset = 0
    for entry in bucket:
        num_bytes = entry.num_bytes(shard_rank)
        if num_bytes:
            yield entry, buffer[offset : offset + num_bytes]
        offset += num_bytes


def _fill_own(bucket: _Bucket, index: SafetensorsIndex, group: ShardGroup, checksums: Checksums) -> torch.Tensor | None:
    """Fill rank 0's shards; return their bytes for the replicas, if there are any."""
    if group.replicate_group is None:
        for entry in bucket:
            _, count = entry.range(group.shard_rank)
            fill_shard(entry.target, index, group.shard_rank, entry.start, count)
        return None
    own = torch.empty(sum(entry.num_bytes(group.shard_rank) for entry in bucket), dtype=torch.uint8)
    _read_bucket(bucket, own, index, group.shard_rank)
    _add_checksums(checksums, bucket, group.shard_rank, index)
    _unpack(own, bucket, group.shard_rank)
    return own.to(bucket[0].target.local.device)


def _receive_all(targets: Sequence[ShardTarget], group: ShardGroup) -> None:
    """Receive all buckets, from rank 0 or from another replica, and forward them to further replicas."""
    pending = None
    num_shards = len(group.ranks)
    memory = torch.empty((2, _shard_bytes(num_shards)), dtype=torch.uint8, device=targets[0].local.device)
    for number, bucket in enumerate(_buckets(targets, num_shards)):
        buffer = memory[number % 2, : sum(entry.num_bytes(group.shard_rank) for entry in bucket)]
        requests = []
        if group.is_first_replica and buffer.numel():
            requests = _exchange(dist.irecv, {group.ranks[0]: buffer}, group)
        if pending:
            _receive(*pending, group)
        pending = (bucket, buffer, requests)
    if pending:
        _receive(*pending, group)


def _receive(bucket: _Bucket, buffer: torch.Tensor, requests: Sequence[dist.Work], group: ShardGroup) -> None:
    _wait(requests)
    _send_to_replicas(buffer, group)
    _unpack(buffer, bucket, group.shard_rank)


def _send_to_replicas(buffer: torch.Tensor | None, group: ShardGroup) -> None:
    """Broadcast one shard's bytes from the first replica. Collective over `group.replicate_group`."""
    if group.replicate_group is not None and buffer is not None and buffer.numel():
        dist.broadcast(buffer, group_src=0, group=group.replicate_group)


def _unpack(buffer: torch.Tensor, bucket: _Bucket, shard_rank: int) -> None:
    for entry, part in _parts(bucket, buffer, shard_rank):
        stored_dtype = entry.target.stored_dtype
        aligned = part if part.storage_offset() % stored_dtype.itemsize == 0 else part.clone()
        _, count = entry.range(shard_rank)
        entry.target.local[entry.start : entry.start + count].copy_(aligned.view(stored_dtype))


def _exchange(
    operation: Callable[..., dist.Work | None], buffers: Mapping[int, torch.Tensor], group: ShardGroup
) -> list[dist.Work]:
    operations = [dist.P2POp(operation, buffer, peer, group=group.group) for peer, buffer in buffers.items()]
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(requests: Sequence[dist.Work]) -> None:
    for request in requests:
        request.wait()


@torch.no_grad()
def broadcast_full(target: ShardTarget, index: SafetensorsIndex | None, device: torch.device) -> None:
    """Read a full parameter or buffer on global rank 0 and broadcast it.

    Collective: every rank must call this, with a `target` whose `local` holds the full tensor.
    """
    step = max(1, BUCKET_BYTES // target.stored_dtype.itemsize)
    for start in range(0, target.local.numel(), step):
        staging = torch.empty(min(step, target.local.numel() - start), dtype=target.stored_dtype)
        if index is not None:
            read_elements(index, target.ranges, start, staging)
        if dist.is_initialized():
            staging = staging.to(device)
            dist.broadcast(as_bytes(staging), src=0)
        target.local[start : start + staging.numel()].copy_(staging)
