"""Distributes a checkpoint from global rank 0, the only rank that reads, to the shards of all ranks.

Bytes are sent in buckets, in the checkpoint's dtype, and cast on arrival. Rank 0 reads buckets ahead into a ring of slots. The
ranks of its node share the ring's memory and copy their parts out of it; other ranks get messages. No rank keeps more than
the ring and two buffers of its own beyond its shards.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.device_copies import Upload
from hf_fsdp_recipes.loading.read_ranges import (
    PROGRESS_TITLE,
    READ_BYTES,
    as_bytes,
    byte_ranges,
    count_readers,
    fill_shard,
    read_bytes,
    read_elements,
)
from hf_fsdp_recipes.loading.safetensors_index import Prefetcher, SafetensorsIndex
from hf_fsdp_recipes.loading.shard_layout import ShardGroup, ShardTarget
from hf_fsdp_recipes.loading.shared_memory import share_memory
from hf_fsdp_recipes.loading.verify import Checksums
from hf_fsdp_recipes.metrics import progress

BUCKET_BYTES = 16 * 1024 * 1024  # for up to MAX_PARTS ranks
MAX_PARTS = 64  # for more ranks buckets grow instead: smaller reads and messages would cost more than they carry
NUM_SLOTS = 4


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


@dataclass(frozen=True)
class _Ring:
    """The slots that rank 0 reads buckets into."""

    memory: torch.Tensor | None  # (slot, shard rank, byte) uint8; None if this rank gets messages
    sharing: set[int]  # the ranks that see rank 0's memory

    def slot(self, number: int) -> torch.Tensor:
        """Return the slot of a bucket."""
        assert self.memory is not None
        return self.memory[number % NUM_SLOTS]


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
    if not targets:
        return
    shape = (NUM_SLOTS, len(group.ranks), _shard_bytes(len(group.ranks)))
    memory, sharing = share_memory(torch.Size(shape).numel())
    ring = _Ring(None if memory is None else memory.view(shape), sharing)
    with distributed.sync_errors():
        upload = Upload(targets[0].local.device, max(shape[2], READ_BYTES))
    if index is not None:
        _send_all(targets, index, group, checksums, ring, upload)
    else:
        _receive_all(targets, group, ring, upload)
    upload.finish()


def _shard_bytes(num_shards: int) -> int:
    """Return the most bytes of one bucket for one shard, a multiple of every dtype's size."""
    return max(BUCKET_BYTES // min(num_shards, MAX_PARTS) // 64, 1) * 64


def _buckets(targets: Sequence[ShardTarget], num_shards: int) -> Iterator[_Bucket]:
    """Split the targets into buckets of at most BUCKET_BYTES for up to MAX_PARTS shards; the same on every rank."""
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


def _send_all(
    targets: Sequence[ShardTarget],
    index: SafetensorsIndex,
    group: ShardGroup,
    checksums: Checksums,
    ring: _Ring,
    upload: Upload,
) -> None:
    total_bytes = sum(count * target.stored_dtype.itemsize for target in targets for _, count in target.shard_ranges)
    prefetcher = Prefetcher(index, (part for target in targets for part in byte_ranges(index, target.ranges)))
    others = [r for r in range(len(group.ranks)) if r != group.shard_rank]
    reading: deque[tuple[int, _Bucket, list[Future[None]]]] = deque()
    in_use: dict[int, list[dist.Work]] = {}  # until other ranks have the bytes of a bucket

    with ThreadPoolExecutor(count_readers(1)) as pool, progress.bar(total_bytes, PROGRESS_TITLE) as bar:

        def send(number: int, bucket: _Bucket, reads: list[Future[None]]) -> None:
            for read in reads:
                read.result()
            buffers = {r: ring.slot(number)[r, : _num_bytes(bucket, r)] for r in others if _num_bytes(bucket, r)}
            in_use[number] = _offer(buffers, bucket, group, ring)
            _fill_own(bucket, index, group, upload)
            num_bytes = sum(_num_bytes(bucket, r) for r in range(len(group.ranks)))
            prefetcher.advance(num_bytes)
            bar.update(num_bytes)

        for number, bucket in enumerate(_buckets(targets, len(group.ranks))):
            if len(reading) == NUM_SLOTS - 1:
                send(*reading.popleft())
            _wait(in_use.pop(number - NUM_SLOTS, []))
            slot = ring.slot(number)
            reads = [pool.submit(_read_bucket, bucket, slot[r], index, r) for r in others]
            checked = others if group.replicate_group is None else range(len(group.ranks))
            reads += [pool.submit(_add_checksums, checksums, bucket, r, index) for r in checked]
            reading.append((number, bucket, reads))
        for item in reading:
            send(*item)
        for requests in in_use.values():
            _wait(requests)


def _num_bytes(bucket: _Bucket, shard_rank: int) -> int:
    return sum(entry.num_bytes(shard_rank) for entry in bucket)


def _offer(buffers: Mapping[int, torch.Tensor], bucket: _Bucket, group: ShardGroup, ring: _Ring) -> list[dist.Work]:
    """Send a bucket to other ranks, or tell them that it is in the ring; return what to wait for before reusing its slot."""
    device = bucket[0].target.local.device
    remote = {group.ranks[r]: b.to(device) for r, b in buffers.items() if group.ranks[r] not in ring.sharing}
    requests = _exchange(dist.isend, remote, group)
    for shard_rank in buffers:
        peer = group.ranks[shard_rank]
        if peer in ring.sharing:
            requests += [_signal(dist.isend, peer), _signal(dist.irecv, peer)]
    return requests


def _signal(operation: Callable[..., dist.Work | None], peer: int) -> dist.Work:
    """Send or receive a message without content between hosts: the bucket is in its slot, or has been copied out of it."""
    request = operation(torch.zeros(1, dtype=torch.uint8), peer, group=distributed.host_group())
    assert request is not None
    return request


def _read_bucket(bucket: _Bucket, buffer: torch.Tensor, index: SafetensorsIndex, shard_rank: int) -> None:
    for entry, part in _parts(bucket, buffer, shard_rank):
        read_bytes(index, entry.target.ranges, *entry.range(shard_rank), part)


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


def _fill_own(bucket: _Bucket, index: SafetensorsIndex, group: ShardGroup, upload: Upload) -> None:
    """Fill rank 0's shards, and those of its replicas."""
    if group.replicate_group is None:
        for entry in bucket:
            _, count = entry.range(group.shard_rank)
            fill_shard(entry.target, index, group.shard_rank, entry.start, count, upload)
        return
    own = upload.buffer(_num_bytes(bucket, group.shard_rank))
    _read_bucket(bucket, own, index, group.shard_rank)
    with upload.uploaded(own) as values:
        _send_to_replicas(values, group)
        _unpack(values, bucket, group.shard_rank)


def _receive_all(targets: Sequence[ShardTarget], group: ShardGroup, ring: _Ring, upload: Upload) -> None:
    """Receive all buckets, from rank 0 or from another replica, and forward them to further replicas."""
    buckets = enumerate(_buckets(targets, len(group.ranks)))
    if group.is_first_replica and ring.memory is not None:
        _copy_from_ring(buckets, group, ring, upload)
        return
    pending = None
    device = targets[0].local.device
    memory = torch.empty((2, _shard_bytes(len(group.ranks))), dtype=torch.uint8, device=device)
    for number, bucket in buckets:
        buffer = memory[number % 2, : _num_bytes(bucket, group.shard_rank)]
        requests = []
        if group.is_first_replica and buffer.numel():
            requests = _exchange(dist.irecv, {group.ranks[0]: buffer}, group)
        if pending:
            _receive(*pending, group)
        pending = (bucket, buffer, requests)
    if pending:
        _receive(*pending, group)


def _copy_from_ring(buckets: Iterator[tuple[int, _Bucket]], group: ShardGroup, ring: _Ring, upload: Upload) -> None:
    on_device = upload.is_asynchronous
    for number, bucket in buckets:
        num_bytes = _num_bytes(bucket, group.shard_rank)
        if not num_bytes:
            continue
        _signal(dist.irecv, group.ranks[0]).wait()
        shared = ring.slot(number)[group.shard_rank, :num_bytes]
        if on_device:  # the slot is free once its bytes are in pinned memory
            shared = upload.buffer(num_bytes).copy_(shared)
            freed = _signal(dist.isend, group.ranks[0])
        with upload.uploaded(shared) as values:
            _send_to_replicas(values, group)
            _unpack(values, bucket, group.shard_rank)
        if not on_device:
            freed = _signal(dist.isend, group.ranks[0])
        freed.wait()


def _receive(bucket: _Bucket, buffer: torch.Tensor, requests: Sequence[dist.Work], group: ShardGroup) -> None:
    _wait(requests)
    _send_to_replicas(buffer, group)
    _unpack(buffer, bucket, group.shard_rank)


def _send_to_replicas(buffer: torch.Tensor, group: ShardGroup) -> None:
    """Broadcast one shard's bytes from the first replica. Collective over `group.replicate_group`."""
    if group.replicate_group is not None and buffer.numel():
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
