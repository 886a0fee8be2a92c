"""Moves a checkpoint's bytes from global rank 0 into the shards of all ranks.

Bytes travel in the checkpoint's dtype and are cast on arrival: through pipes to the ranks of rank 0's own machine whose
shards are in host memory (`lanes.py`), in buckets of messages to others and to copies; nothing larger than two buckets is
held beside the shards. What each rank gets, and how one reads for itself, is in `destinations.py`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.loading.first_touch import populate
from hf_fsdp_recipes.loading.lanes import Lanes, lay, pour, take
from hf_fsdp_recipes.loading.safetensors_index import ReadAhead, Run, SafetensorsIndex
from hf_fsdp_recipes.loading.shard_layout import (
    LOAD_TITLE,
    SAMPLE_ELEMENTS,
    Checksums,
    ShardGroup,
    ShardTarget,
    as_bytes,
    fill,
    fill_from_file,
    read_run,
    slice_in_files,
    whole_in_files,
)
from hf_fsdp_recipes.metrics import progress

BUCKET_BYTES = 32 * 1024 * 1024  # what rank 0 stages at once, over all receivers; two buckets are in flight


@dataclass(frozen=True)
class _Entry:
    """Elements [start, start + length) of every member's slice of one destination."""

    destination: ShardTarget
    start: int
    length: int

    def run(self, position: int) -> tuple[int, int]:
        """Return (first element of the whole parameter, number of elements) for one member."""
        first, count = self.destination.runs[position]
        return first + self.start, max(0, min(count - self.start, self.length))

    def num_bytes(self, position: int) -> int:
        return self.run(position)[1] * self.destination.wire_dtype.itemsize


def scatter(
    destinations: Sequence[ShardTarget],
    checkpoint: SafetensorsIndex | None,
    group: ShardGroup,
    checksums: Checksums,
) -> None:
    """Fill the slices of all ranks from a checkpoint that only global rank 0 can read.

    Collective: every rank must call this, with the same destinations in the same order.

    Args:
        destinations: the parameters, sorted as the bytes lie in the files; all cut over the same group.
        checkpoint: on global rank 0; None elsewhere.
        group: how the parameters are cut and copied.
        checksums: what rank 0 read, for every member; filled on rank 0 only.
    """
    if not destinations:
        return
    lanes = lay(group.ranks, destinations[0].local.device)
    # Where nothing but lanes leads to the others, an error of one rank can be told to all of them.
    needs_messages = group.copies is not None or len(lanes.reached) < len(group.ranks) - 1
    with (
        contextlib.nullcontext() if needs_messages else distributed.sync_errors(),
        contextlib.closing(lanes),
        torch.no_grad(),
    ):
        if checkpoint is not None:
            _send_all(destinations, checkpoint, group, lanes, checksums)
        elif needs_messages:
            _receive_all(destinations, group, lanes)
        else:
            _fill_from_lane(destinations, group.position, lanes)


def _member_bytes(num_members: int) -> int:
    """Return what one member gets of one bucket at most."""
    return max(BUCKET_BYTES // num_members, 64)


def _buckets(destinations: Sequence[ShardTarget], num_members: int) -> Iterator[list[_Entry]]:
    """Cut the destinations into buckets of at most BUCKET_BYTES over all members; the same on every rank."""
    bucket: list[_Entry] = []
    room = budget = _member_bytes(num_members)
    for destination in destinations:
        item_bytes = destination.wire_dtype.itemsize
        longest = max(count for _, count in destination.runs)
        start = 0
        while start < longest:
            if room < item_bytes:
                yield bucket
                bucket, room = [], budget
            length = min(longest - start, room // item_bytes)
            bucket.append(_Entry(destination, start, length))
            start, room = start + length, room - length * item_bytes
    if bucket:
        yield bucket


def _send_all(
    destinations: Sequence[ShardTarget],
    checkpoint: SafetensorsIndex,
    group: ShardGroup,
    lanes: Lanes,
    checksums: Checksums,
) -> None:
    streams = {place: _stream(destinations, place, checkpoint, checksums) for place in lanes.outgoing}
    staging = _stage(destinations, checkpoint, group, lanes, checksums)
    whole_bytes = sum(count * item.wire_dtype.itemsize for item in destinations for _, count in item.runs)
    wanted = (run for item in destinations for run in whole_in_files(checkpoint, item.pieces))
    ahead = ReadAhead(checkpoint, wanted)
    with ThreadPoolExecutor(max_workers=2) as helpers, progress.bar(whole_bytes, LOAD_TITLE) as shown:
        poured = helpers.submit(pour, lanes, streams, checkpoint)
        upcoming = helpers.submit(next, staging, None)
        while (staged := upcoming.result()) is not None:
            if poured.done():
                poured.result()  # its error is told now, not when the network has been served
            bucket, buffers = staged
            device = bucket[0].destination.local.device
            outgoing = {group.ranks[place]: buffer.to(device) for place, buffer in buffers.items()}
            requests = _exchange(dist.isend, outgoing, group)
            upcoming = helpers.submit(next, staging, None)
            own = _fill_own(bucket, checkpoint, group, checksums)
            _pass_to_copies(own, bucket, group)
            _wait(requests)
            num_bytes = sum(entry.num_bytes(place) for entry in bucket for place in range(len(group.ranks)))
            ahead.advance(num_bytes)
            shown.update(num_bytes)
        poured.result()


def _stream(
    destinations: Sequence[ShardTarget], place: int, checkpoint: SafetensorsIndex, checksums: Checksums
) -> Iterator[Run]:
    """Yield where the bytes of one member's slices lie, in the order in which it takes them."""
    for destination in destinations:
        _add_checksum(checksums, destination, place, checkpoint)
        yield from slice_in_files(checkpoint, destination, place)


def _fill_from_lane(destinations: Sequence[ShardTarget], place: int, lanes: Lanes) -> None:
    """Take this rank's slices one after the other."""
    assert lanes.incoming is not None
    lane = lanes.incoming
    for destination in destinations:
        fill(destination, 0, destination.runs[place][1], lambda _, out: take(lane, out))


def _stage(
    destinations: Sequence[ShardTarget],
    checkpoint: SafetensorsIndex,
    group: ShardGroup,
    lanes: Lanes,
    checksums: Checksums,
) -> Iterator[tuple[list[_Entry], dict[int, torch.Tensor]]]:
    """Read bucket after bucket of what members without a lane get: one byte buffer for each that gets any."""
    others = [place for place in range(len(group.ranks)) if place != group.position and place not in lanes.reached]
    # Two buckets' memory, used in turn: fresh memory costs more than reading into it.
    memory = torch.empty((2, len(others), _member_bytes(len(group.ranks))), dtype=torch.uint8)
    for number, bucket in enumerate(_buckets(destinations, len(group.ranks))):
        buffers = {}
        for row, place in zip(memory[number % 2], others, strict=True):
            num_bytes = sum(entry.num_bytes(place) for entry in bucket)
            if num_bytes:
                buffers[place] = row[:num_bytes]
                _read_bucket(bucket, buffers[place], checkpoint, place)
            _add_checksums(checksums, bucket, place, checkpoint)
        yield bucket, buffers


def _read_bucket(bucket: Sequence[_Entry], buffer: torch.Tensor, checkpoint: SafetensorsIndex, position: int) -> None:
    for entry, part in _parts(bucket, buffer, position):
        first, _ = entry.run(position)
        destination = entry.destination
        read_run(checkpoint, destination.pieces, destination.wire_dtype.itemsize, first, part)


def _add_checksums(checksums: Checksums, bucket: Sequence[_Entry], place: int, checkpoint: SafetensorsIndex) -> None:
    for entry in bucket:
        if entry.start == 0:
            _add_checksum(checksums, entry.destination, place, checkpoint)


def _add_checksum(checksums: Checksums, destination: ShardTarget, place: int, checkpoint: SafetensorsIndex) -> None:
    """Read once more what one member gets of a parameter, or its beginning, for the proof of what arrives."""
    first, count = destination.runs[place]
    count = count if checksums.covers_all else min(count, SAMPLE_ELEMENTS)
    step = BUCKET_BYTES // destination.wire_dtype.itemsize
    for start in range(0, count, step):
        elements = torch.empty(min(step, count - start), dtype=destination.wire_dtype)
        read_run(checkpoint, destination.pieces, elements.dtype.itemsize, first + start, as_bytes(elements))
        checksums.add(destination.name, place, start, elements.to(destination.dtype))


def _parts(bucket: Sequence[_Entry], buffer: torch.Tensor, position: int) -> Iterator[tuple[_Entry, torch.Tensor]]:
    """Walk a member's byte buffer, entry by entry."""
    offset = 0
    for entry in bucket:
        num_bytes = entry.num_bytes(position)
        if num_bytes:
            yield entry, buffer[offset : offset + num_bytes]
        offset += num_bytes


def _fill_own(
    bucket: Sequence[_Entry], checkpoint: SafetensorsIndex, group: ShardGroup, checksums: Checksums
) -> torch.Tensor | None:
    """Fill rank 0's slices; return their bytes as sent to copies, where there are copies."""
    if group.copies is None:
        for entry in bucket:
            first, count = entry.run(group.position)
            if count:
                fill_from_file(entry.destination, checkpoint, first, entry.start, count)
        return None
    own = torch.empty(sum(entry.num_bytes(group.position) for entry in bucket), dtype=torch.uint8)
    _read_bucket(bucket, own, checkpoint, group.position)
    _add_checksums(checksums, bucket, group.position, checkpoint)
    _unpack(own, bucket, group.position)
    return own.to(bucket[0].destination.local.device)


def _receive_all(destinations: Sequence[ShardTarget], group: ShardGroup, lanes: Lanes) -> None:
    """Take bucket after bucket, from messages, the lane or another copy, and hand them on to further copies."""
    pending = None
    num_members = len(group.ranks)
    memory = torch.empty((2, _member_bytes(num_members)), dtype=torch.uint8, device=destinations[0].local.device)
    for number, bucket in enumerate(_buckets(destinations, num_members)):
        buffer = memory[number % 2, : sum(entry.num_bytes(group.position) for entry in bucket)]
        requests = []
        if lanes.incoming is not None:
            take(lanes.incoming, buffer)
        elif group.holds_first_copy and buffer.numel():
            requests = _exchange(dist.irecv, {group.ranks[0]: buffer}, group)
        if pending:
            _land(*pending, group)
        pending = (bucket, buffer, requests)
    if pending:
        _land(*pending, group)


def _land(bucket, buffer, requests, group: ShardGroup) -> None:  # type: ignore[no-untyped-def]
    _wait(requests)
    _pass_to_copies(buffer, bucket, group)
    _unpack(buffer, bucket, group.position)


def _pass_to_copies(buffer: torch.Tensor | None, bucket: Sequence[_Entry], group: ShardGroup) -> None:
    """Hand a member's bytes on to the same place in the other copies. Collective over `group.copies`."""
    if group.copies is not None and buffer is not None and buffer.numel():
        dist.broadcast(buffer, group_src=0, group=group.copies)


def _unpack(buffer: torch.Tensor, bucket: Sequence[_Entry], position: int) -> None:
    for entry, part in _parts(bucket, buffer, position):
        wire_dtype = entry.destination.wire_dtype
        aligned = part if part.storage_offset() % wire_dtype.itemsize == 0 else part.clone()
        _, count = entry.run(position)
        local = entry.destination.local[entry.start : entry.start + count]
        populate(local)
        local.copy_(aligned.view(wire_dtype))


def _exchange(operation, buffers: Mapping[int, torch.Tensor], group: ShardGroup) -> list[dist.Work]:  # type: ignore[no-untyped-def]
    operations = [dist.P2POp(operation, buffer, peer, group=group.group) for peer, buffer in buffers.items()]
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(requests: Sequence[dist.Work]) -> None:
    for request in requests:
        request.wait()


def broadcast_whole(destination: ShardTarget, checkpoint: SafetensorsIndex | None, device: torch.device) -> None:
    """Give every rank all of a parameter or buffer that only global rank 0 can read.

    Collective: every rank must call this, with `local` holding the whole tensor.
    """
    count = destination.local.numel()
    step = max(1, BUCKET_BYTES // destination.wire_dtype.itemsize)
    with torch.no_grad():
        for start in range(0, count, step):
            staging = torch.empty(min(step, count - start), dtype=destination.wire_dtype)
            if checkpoint is not None:
                read_run(checkpoint, destination.pieces, staging.dtype.itemsize, start, as_bytes(staging))
            if dist.is_initialized():
                staging = staging.to(device)
                dist.broadcast(staging, src=0)
            destination.local[start : start + staging.numel()].copy_(staging)
