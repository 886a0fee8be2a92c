"""Distributes weights from global rank 0, the only rank that reads them, to the shards of all ranks.

The weights are sent as a sequence of buckets: buffers of up to BUCKET_BYTES that hold parts of tensors in the checkpoint's
dtype. Rank 0 reads buckets ahead into memory that the ranks of its node share. The first rank of each node passes every bucket
on to the first rank of the next node. All ranks copy their own elements out of their node's memory and cast them. So rank 0
reads each byte once and sends it to at most one other node, and shards, replicas and full tensors are filled in the same way.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.device_copies import Upload
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.read_ranges import READ_BYTES, as_bytes, byte_ranges, count_readers, read_bytes
from hf_fsdp_recipes.loading.safetensors_index import Prefetcher, SafetensorsIndex
from hf_fsdp_recipes.loading.shard_layout import ShardTarget
from hf_fsdp_recipes.loading.shared_memory import share_memory

BUCKET_BYTES = 16 * 1024 * 1024  # a multiple of ALIGNMENT
NUM_SLOTS = 4  # number of buckets that fit into the memory that the ranks of a node share
ALIGNMENT = 64  # bytes to which each tensor in a bucket is aligned; a multiple of every dtype's size
UPLOAD_BYTES = 4 * 1024 * 1024  # size of a pinned buffer, of which each rank has two; a multiple of ALIGNMENT
SAMPLE_SPANS = 8  # number of spans that are verified in each tensor
SAMPLE_ELEMENTS = 64  # number of elements in each of these spans

Span = tuple[ShardTarget, int, int]  # (target, offset into the full tensor, number of elements)
Use = Callable[
    [ShardTarget, int, torch.Tensor], None
]  # (target, offset into the shard in elements, values in the stored dtype)


@dataclass(frozen=True)
class _Piece:
    """Elements [first, first + count) of a full tensor. In the bucket, they start at byte `offset`."""

    target: ShardTarget
    first: int
    count: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.target.stored_dtype.itemsize


_Bucket = Sequence[_Piece]


class WeightStream:
    """Sends weights from rank 0 to every rank, and reads a sample of them again to verify that they arrived unchanged.

    Collective: every rank must create a stream and call the same methods, with the same targets in the same order.

    Args:
        index: the checkpoint on global rank 0; ignored elsewhere.
        verifies_all: verify every element instead of a sample.
    """

    def __init__(self, index: SafetensorsIndex | None, verifies_all: bool) -> None:
        self._index = index
        self._verifies_all = verifies_all
        self._uploads: dict[torch.device, Upload] = {}
        # For each device: names of verified tensors, and flags that are true if this rank's elements differ from rank 0's. They
        # stay on the device until one synchronization reads all of them.
        self._differs: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        self._error: Exception | None = None  # the error of the first failed read

    def fill(
        self,
        targets: Sequence[ShardTarget],
        index: SafetensorsIndex | None = None,
        advance: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """Fill every rank's shards of the targets from `index`, or from the stream's own index if `index` is None.

        After each bucket, rank 0 calls `advance` with the bucket's number of bytes. A read error is kept until `check` raises it.
        """
        self._send([(target, 0, target.num_elements) for target in targets], _copy, index or self._index, advance)

    def verify(self, targets: Sequence[ShardTarget], index: SafetensorsIndex | None = None) -> None:
        """Read a sample of the targets again and compare it with the shards. `check` raises an error if they differ."""

        def compare(target: ShardTarget, start: int, values: torch.Tensor) -> None:
            local = target.local[start : start + values.numel()]
            differs = (as_bytes(local) != as_bytes(values.to(target.dtype))).any()
            self._differs.setdefault(local.device, []).append((target.name, differs))

        spans = [span for target in targets for span in _spans(target, self._verifies_all)]
        self._send(spans, compare, index or self._index, lambda num_bytes: None)

    def check(self) -> None:
        """Raise the first read error, or a LoadError if `verify` found a difference. The error is raised on every rank."""
        distributed.raise_together(self._error)
        names = [
            name
            for compared in self._differs.values()
            for (name, _), differs in zip(compared, torch.stack([flag for _, flag in compared]).tolist(), strict=True)
            if differs
        ]
        self._differs = {}
        with distributed.sync_errors():
            if names:
                raise LoadError(
                    f"{names[0]}: rank {distributed.rank()} received different bytes than rank 0 read. Check the network and "
                    f"the memory."
                )

    @torch.no_grad()
    def _send(
        self, spans: Sequence[Span], use: Use, index: SafetensorsIndex | None, advance: Callable[[int], object]
    ) -> None:
        if not spans:
            return
        upload = self._connect(spans[0][0].local.device)
        upload.start()
        buckets = enumerate(_buckets(spans))
        if distributed.is_main():
            assert index is not None
            self._read_and_pass_on(buckets, spans, use, upload, index, advance)
        elif distributed.rank() == self._node.ranks[0]:
            self._pass_on(buckets, use, upload, self._receive)
        else:
            self._take_all(buckets, use, upload)
        upload.finish()

    def _take_all(self, buckets: Iterable[tuple[int, _Bucket]], use: Use, upload: Upload) -> None:
        """Use this rank's elements of every bucket that the first rank of its node passes on."""
        first_of_node = self._node.ranks[0]
        # Post receives ahead: gloo sends a message only when its receive is posted, so this saves a round trip per bucket.
        posted: deque[tuple[int, _Bucket, dist.Work]] = deque()
        replies: deque[dist.Work] = deque()

        def take(number: int, bucket: _Bucket, arrival: dist.Work) -> None:
            arrival.wait()
            _take(bucket, self._slot(number), use, upload)
            replies.append(self._signal(dist.isend, first_of_node))
            if len(replies) == NUM_SLOTS:
                replies.popleft().wait()

        for number, bucket in buckets:
            if len(posted) == NUM_SLOTS:
                take(*posted.popleft())
            posted.append((number, bucket, self._signal(dist.irecv, first_of_node)))
        for item in posted:
            take(*item)
        _wait(replies)

    def _read_and_pass_on(
        self,
        buckets: Iterable[tuple[int, _Bucket]],
        spans: Sequence[Span],
        use: Use,
        upload: Upload,
        index: SafetensorsIndex,
        advance: Callable[[int], object],
    ) -> None:
        prefetcher = Prefetcher(
            index, (part for t, *elements in spans for part in byte_ranges(index, t.ranges, *elements))
        )
        with ThreadPoolExecutor(count_readers(1)) as pool:

            def read(bucket: _Bucket, slot: torch.Tensor) -> list[Callable[[], object]]:
                return [pool.submit(self._read, pieces, slot, index).result for pieces in _split(bucket)]

            def note(bucket: _Bucket) -> None:
                num_bytes = sum(piece.num_bytes for piece in bucket)
                prefetcher.advance(num_bytes)
                advance(num_bytes)

            self._pass_on(buckets, use, upload, read, note)

    def _read(self, pieces: Sequence[_Piece], slot: torch.Tensor, index: SafetensorsIndex) -> None:
        """Read pieces into a slot (one bucket's memory). After an error, write zeros, so that all ranks finish the exchange."""
        for piece in pieces:
            buffer = slot[piece.offset : piece.offset + piece.num_bytes]
            try:
                if self._error is None:
                    read_bytes(index, piece.target.ranges, piece.first, piece.count, buffer)
            except Exception as error:
                self._error = error
            if self._error is not None:
                buffer.zero_()

    def _receive(self, bucket: _Bucket, slot: torch.Tensor) -> list[Callable[[], object]]:
        first_ranks = self._node.first_ranks
        before = first_ranks[first_ranks.index(distributed.rank()) - 1]
        return [self._transfer(dist.irecv, slot[: _end(bucket)], before).wait]

    def _pass_on(
        self,
        buckets: Iterable[tuple[int, _Bucket]],
        use: Use,
        upload: Upload,
        fetch: Callable[[_Bucket, torch.Tensor], list[Callable[[], object]]],
        note: Callable[[_Bucket], None] = lambda bucket: None,
    ) -> None:
        """Pass buckets on to the next node and to this node's ranks, and fetch NUM_SLOTS - 1 buckets ahead.

        `fetch` starts to fill a slot with a bucket, and returns functions that wait until the slot is full. `note` is called with
        each bucket after this rank has used its elements.
        """
        after = self._node.first_ranks[self._node.first_ranks.index(distributed.rank()) + 1 :][:1]
        fetching: deque[tuple[int, _Bucket, list[Callable[[], object]]]] = deque()
        in_use: deque[list[dist.Work]] = deque()  # sends and receives of buckets that other ranks may still need

        def pass_on(number: int, bucket: _Bucket, arrivals: list[Callable[[], object]]) -> None:
            for wait in arrivals:
                wait()
            slot = self._slot(number)
            requests = [self._transfer(dist.isend, slot[: _end(bucket)], rank) for rank in after]
            for rank in self._node.ranks[1:]:
                requests += [self._signal(dist.isend, rank), self._signal(dist.irecv, rank)]
            in_use.append(requests)
            _take(bucket, slot, use, upload)
            note(bucket)

        for number, bucket in buckets:
            if len(fetching) == NUM_SLOTS - 1:
                pass_on(*fetching.popleft())
            if number >= NUM_SLOTS:
                _wait(in_use.popleft())
            fetching.append((number, bucket, fetch(bucket, self._slot(number))))
        for item in fetching:
            pass_on(*item)
        for requests in in_use:
            _wait(requests)

    def _slot(self, number: int) -> torch.Tensor:
        start = number % NUM_SLOTS * BUCKET_BYTES
        return self._node.values[start : start + BUCKET_BYTES]

    def _signal(self, operation: Callable[..., dist.Work | None], peer: int) -> dist.Work:
        """Send or receive the message that a bucket is in its slot, or that a rank no longer needs the slot."""
        return self._transfer(operation, torch.zeros(1, dtype=torch.uint8), peer)

    def _transfer(self, operation: Callable[..., dist.Work | None], values: torch.Tensor, peer: int) -> dist.Work:
        request = operation(values, peer, group=self._group)
        assert request is not None
        return request

    def _connect(self, device: torch.device) -> Upload:
        """Return the Upload that copies to a device. The first call also creates the memory that the ranks of a node share."""
        if not self._uploads:
            self._group = distributed.patient_group()  # rank 0 may have to wait for slow storage
            self._node = share_memory(NUM_SLOTS * BUCKET_BYTES)
        if device not in self._uploads:
            with distributed.sync_errors():
                self._uploads[device] = Upload(device, UPLOAD_BYTES)
        return self._uploads[device]


def _spans(target: ShardTarget, is_full: bool) -> Iterator[Span]:
    """Yield the spans of a target to verify: the full tensor, or short spans at places that vary between targets."""
    segment = target.num_elements // SAMPLE_SPANS
    if is_full or segment <= SAMPLE_ELEMENTS:
        yield target, 0, target.num_elements
        return
    for number in range(SAMPLE_SPANS):
        shift = zlib.crc32(f"{target.name} {number}".encode()) % (segment - SAMPLE_ELEMENTS)
        yield target, number * segment + shift, SAMPLE_ELEMENTS


def _buckets(spans: Iterable[Span]) -> Iterator[_Bucket]:
    """Split spans into buckets of at most BUCKET_BYTES. Every rank computes the same buckets."""
    bucket: list[_Piece] = []
    used = 0
    for target, start, num_elements in spans:
        first, end = start, start + num_elements
        while first < end:
            count = min((BUCKET_BYTES - used) // target.stored_dtype.itemsize, end - first)
            if count <= 0:
                yield bucket
                bucket, used = [], 0
                continue
            piece = _Piece(target, first, count, used)
            bucket.append(piece)
            first, used = first + count, _align(used + piece.num_bytes)
    if bucket:
        yield bucket


def _split(bucket: _Bucket) -> Iterator[Sequence[_Piece]]:
    """Split a bucket into batches of at most READ_BYTES for the reading threads."""
    batch: list[_Piece] = []
    used = 0
    for piece in bucket:
        item_bytes = piece.target.stored_dtype.itemsize
        step = READ_BYTES // item_bytes
        for start in range(0, piece.count, step):
            count = min(step, piece.count - start)
            if batch and used + count * item_bytes > READ_BYTES:
                yield batch
                batch, used = [], 0
            used += count * item_bytes
            batch.append(_Piece(piece.target, piece.first + start, count, piece.offset + start * item_bytes))
    if batch:
        yield batch


def _take(bucket: _Bucket, slot: torch.Tensor, use: Use, upload: Upload) -> None:
    """Call `use` with this rank's elements of a bucket.

    After the call, the bucket's slot may be overwritten, even if the copy to the device is still running.
    """
    parts = []
    for piece in bucket:
        target, item_bytes = piece.target, piece.target.stored_dtype.itemsize
        start = max(piece.first, target.first)
        end = min(piece.first + piece.count, target.first + target.local.numel())
        if start < end:
            offset = piece.offset + (start - piece.first) * item_bytes
            parts.append((target, start - target.first, slot[offset : offset + (end - start) * item_bytes]))
    if not upload.is_asynchronous:
        for target, start, values in parts:
            use(target, start, values.view(target.stored_dtype))
        return
    batch: list[tuple[ShardTarget, int, torch.Tensor]] = []
    used = 0
    for target, start, values in parts:
        for offset in range(0, values.numel(), UPLOAD_BYTES):
            chunk = values[offset : offset + UPLOAD_BYTES]
            if used + chunk.numel() > UPLOAD_BYTES:
                _upload(batch, use, upload)
                batch, used = [], 0
            batch.append((target, start + offset // target.stored_dtype.itemsize, chunk))
            used += _align(chunk.numel())
    if batch:
        _upload(batch, use, upload)


def _upload(batch: Sequence[tuple[ShardTarget, int, torch.Tensor]], use: Use, upload: Upload) -> None:
    """Copy values to the device through one pinned buffer, and call `use` with the copies."""
    buffer, used = upload.buffer(UPLOAD_BYTES), 0
    places = []
    for _, _, values in batch:
        places.append((used, used + values.numel()))
        buffer[slice(*places[-1])].copy_(values)
        used = _align(used + values.numel())
    with upload.uploaded(buffer[: places[-1][1]]) as on_device:
        for (target, start, _), place in zip(batch, places, strict=True):
            use(target, start, on_device[slice(*place)].view(target.stored_dtype))


def _copy(target: ShardTarget, start: int, values: torch.Tensor) -> None:
    target.local[start : start + values.numel()].copy_(values)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _end(bucket: _Bucket) -> int:
    return bucket[-1].offset + bucket[-1].num_bytes


def _wait(requests: Iterable[dist.Work]) -> None:
    for request in requests:
        request.wait()
