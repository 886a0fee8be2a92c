"""Where a parameter's bytes go, and how a rank reads them for itself.

Works on flat runs of elements. A `ShardTarget` is one parameter's local shard together with what every rank
must know to take part: whose elements are whose. Does not know models or wrappers, nor other ranks.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hf_fsdp_recipes.loading.first_touch import populate
from hf_fsdp_recipes.loading.safetensors_index import ReadAhead, Run, SafetensorsIndex
from hf_fsdp_recipes.loading.weight_mapping import TensorRange
from hf_fsdp_recipes.metrics import progress

LOAD_TITLE = "load weights"
READ_BYTES = 2 * 1024 * 1024  # what a rank takes at once; in a core's cache while it is cast
SAMPLE_ELEMENTS = 1024  # how much of each slice the always-on checksum covers


@dataclass(frozen=True)
class ShardTarget:
    """One parameter's place on this rank.

    Attributes:
        name: the parameter's name, for messages.
        pieces: what fills it, in its row-major order, over the whole parameter.
        wire_dtype: the checkpoint's dtype, which bytes travel in.
        dtype: the parameter's dtype.
        runs: for each member of the shard group, (first element, number of elements) of the whole parameter.
        local: this rank's slice, 1-D and contiguous, on its device.
        is_packed: whether it holds 4-bit weights, which are quantised before they travel.
    """

    name: str
    pieces: Sequence[TensorRange]
    wire_dtype: torch.dtype
    dtype: torch.dtype
    runs: Sequence[tuple[int, int]]
    local: torch.Tensor
    is_packed: bool = False


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that a parameter is cut over, and the copies of it beside them.

    Attributes:
        ranks: global ranks that together hold global rank 0's copy, in the order of the cut.
        position: this rank's place in the cut.
        holds_first_copy: whether this rank is one of `ranks`.
        copies: process group over the ranks with the same place in other copies, or None with one copy.
        group: process group over `ranks`, or None for the world.
    """

    ranks: Sequence[int]
    position: int
    holds_first_copy: bool = True
    copies: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None


@dataclass
class Checksums:
    """Running CRC-32 by (parameter, position in the cut), over elements in the parameter's own dtype."""

    covers_all: bool
    values: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, name: str, position: int, start: int, elements: torch.Tensor) -> None:
        """Take in elements (1-D, in the parameter's dtype, CPU) that lie `start` elements into the slice."""
        if not self.covers_all:
            elements = elements[: max(0, SAMPLE_ELEMENTS - start)]
        if elements.numel():
            key = (name, position)
            self.values[key] = zlib.crc32(as_bytes(elements.contiguous()).numpy(), self.values.get(key, 0))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as 1-D uint8 without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def runs_in_files(
    checkpoint: SafetensorsIndex, pieces: Sequence[TensorRange], item_bytes: int, first: int, num_bytes: int
) -> Iterator[Run]:
    """Yield where `num_bytes` of a parameter lie, in order, from element `first` on."""
    skip = first
    for piece in pieces:
        if skip >= piece.num_elements:
            skip -= piece.num_elements
            continue
        length = min((piece.num_elements - skip) * item_bytes, num_bytes)
        yield checkpoint.tensors[piece.tensor], (piece.start + skip) * item_bytes, length
        num_bytes, skip = num_bytes - length, 0
        if not num_bytes:
            return


def whole_in_files(checkpoint: SafetensorsIndex, pieces: Sequence[TensorRange]) -> Iterator[Run]:
    """Yield where the bytes of a whole parameter lie, in order."""
    for piece in pieces:
        tensor = checkpoint.tensors[piece.tensor]
        item_bytes = tensor.dtype.itemsize
        yield tensor, piece.start * item_bytes, piece.num_elements * item_bytes


def slice_in_files(checkpoint: SafetensorsIndex, destination: ShardTarget, place: int) -> Iterator[Run]:
    """Yield where the bytes of one member's slice of a parameter lie, in order."""
    first, count = destination.runs[place]
    item_bytes = destination.wire_dtype.itemsize
    return runs_in_files(checkpoint, destination.pieces, item_bytes, first, count * item_bytes)


def read_run(
    checkpoint: SafetensorsIndex, pieces: Sequence[TensorRange], item_bytes: int, first: int, out: torch.Tensor
) -> None:
    """Read the bytes of a parameter's elements from `first` on into `out` (uint8, CPU); its size says how many."""
    filled = 0
    for tensor, start, num_bytes in runs_in_files(checkpoint, pieces, item_bytes, first, out.numel()):
        checkpoint.read_into(out[filled : filled + num_bytes], tensor, start)
        filled += num_bytes


def read_direct(destinations: Sequence[ShardTarget], checkpoint: SafetensorsIndex, position: int) -> None:
    """Fill this rank's slices from the checkpoint. Every rank may call this on its own; no collective."""
    sizes = [destination.runs[position][1] * destination.wire_dtype.itemsize for destination in destinations]

    def read(destination: ShardTarget) -> None:
        first, count = destination.runs[position]
        fill_from_file(destination, checkpoint, first, 0, count)

    ahead = ReadAhead(checkpoint, (run for item in destinations for run in slice_in_files(checkpoint, item, position)))
    with ThreadPoolExecutor(max_workers=_num_readers()) as pool, progress.bar(sum(sizes), LOAD_TITLE) as shown:
        for num_bytes, _ in zip(sizes, pool.map(read, destinations), strict=True):
            ahead.advance(num_bytes)
            shown.update(num_bytes)


def _num_readers() -> int:
    """Return how many threads of this rank read at once: two, where the machine has two cores for each rank.

    Reading warm files is work for a core, and threads that take turns on one only get in each other's way.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2, max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def fill_from_file(destination: ShardTarget, checkpoint: SafetensorsIndex, first: int, start: int, length: int) -> None:
    """Read `length` elements, in the parameter from `first` on and in this rank's slice from `start` on."""

    def read(offset: int, out: torch.Tensor) -> None:
        read_run(checkpoint, destination.pieces, destination.wire_dtype.itemsize, first + offset, out)

    fill(destination, start, length, read)


def fill(destination: ShardTarget, start: int, length: int, read: Callable[[int, torch.Tensor], None]) -> None:
    """Fill `length` elements of this rank's slice from `start` on, some at a time.

    Args:
        destination: the parameter.
        start: in the slice, elements.
        length: elements.
        read: puts the bytes that come `offset` elements after the first into a uint8 tensor on the CPU.
    """
    wire_dtype = destination.wire_dtype
    step = READ_BYTES // wire_dtype.itemsize
    for offset in range(0, length, step):
        local = destination.local[start + offset : start + min(offset + step, length)]
        populate(local)
        straight = local.device.type == "cpu" and local.dtype == wire_dtype
        staging = local if straight else torch.empty(local.numel(), dtype=wire_dtype)
        read(offset, as_bytes(staging))
        if not straight:
            local.copy_(staging)
