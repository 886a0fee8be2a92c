"""Pipes through which rank 0 hands the ranks of its own machine the bytes that it reads, into shards in host memory.

Rank 0 puts pages of the kernel's file cache into a pipe (splice) without taking them into its own memory, and the rank
at the other end copies them to where they belong: each byte is copied once, as if that rank had read the file itself.
A pipe has no name that could be left behind; a neighbour opens it under /proc/<rank 0>/fd. A rank that cannot do that
(another machine, another container, not Linux) has no lane, and `transfer.py` sends it messages.

Source: splice(2), pipe(7), proc(5).
"""

import contextlib
import os
import secrets
import select
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.safetensors_index import Run, SafetensorsIndex

NAME = "hf_fsdp_recipes"
TOKEN_BYTES = 16
LANE_BYTES = 1024 * 1024  # what any user may ask of a pipe (fs.pipe-max-size); smaller where that fails
PATIENCE_SECONDS = 1800  # how long a lane may stand still: as long as a collective may, unless told otherwise


@dataclass
class Lanes:
    """One rank's ends of the lanes.

    Attributes:
        outgoing: on rank 0, the descriptor of each member's lane, by its place in the cut.
        incoming: on a neighbour, its descriptor; None elsewhere.
        reached: the members that have a lane, on every rank.
    """

    outgoing: dict[int, int] = field(default_factory=dict)
    incoming: int | None = None
    reached: frozenset[int] = frozenset()

    def close(self) -> None:
        """Close what is still open; the other ends learn of it."""
        for descriptor in [*self.outgoing.values(), *([] if self.incoming is None else [self.incoming])]:
            os.close(descriptor)
        self.outgoing, self.incoming = {}, None


def lay(members: Sequence[int], device: torch.device) -> Lanes:
    """Lay a lane from rank 0 to every member that runs beside it.

    Collective: every rank must call this.

    Args:
        members: global ranks, in the order of the cut.
        device: where the shards are. Lanes lead to host memory only.
    """
    others = [place for place, member in enumerate(members) if member != 0]
    ours: list[int] = []  # rank 0's descriptors that only had to be there until the others had opened them
    lanes, offer = Lanes(), None
    if distributed.is_main() and device.type == "cpu" and others:
        ours, lanes.outgoing, offer = _make(others)
    offer = distributed.broadcast_object(offer)
    if offer is not None and not distributed.is_main() and distributed.rank() in members:
        proof, token, far_ends = offer
        lanes.incoming = _open(proof, token, far_ends.get(list(members).index(distributed.rank())))
    has_lane = distributed.gather_objects(lanes.incoming is not None)
    for descriptor in ours:
        os.close(descriptor)
    lanes.reached = frozenset(place for place in others if has_lane[members[place]])
    for place in set(lanes.outgoing) - lanes.reached:
        os.close(lanes.outgoing.pop(place))
    return lanes


def pour(lanes: Lanes, streams: Mapping[int, Iterable[Run]], checkpoint: SafetensorsIndex) -> None:
    """Send each member its runs of bytes, whoever has room next. Rank 0 only; closes the lanes.

    A member that leaves is left alone: it says itself why.

    Raises:
        LoadError: nobody has taken anything for PATIENCE_SECONDS, or a file ends early.
    """
    waiting = select.poll()
    flows = {}
    for place, descriptor in lanes.outgoing.items():
        flows[descriptor] = _flow(descriptor, streams[place], checkpoint)
        waiting.register(descriptor, select.POLLOUT)
    try:
        while flows:
            ready = waiting.poll(PATIENCE_SECONDS * 1000)
            if not ready:
                raise LoadError(
                    f"no rank has taken any weights for {PATIENCE_SECONDS} s. Remedy: see what they wait for."
                )
            for descriptor, _ in ready:
                if next(flows[descriptor], None) is None:
                    waiting.unregister(descriptor)
                    del flows[descriptor]
    finally:
        lanes.close()


def _flow(lane: int, runs: Iterable[Run], checkpoint: SafetensorsIndex) -> Iterator[bool]:
    """Put runs of bytes into a lane; stop, to be asked again, whenever it is full."""
    for tensor, start, num_bytes in runs:
        end = start + num_bytes
        while start < end:
            try:
                start += checkpoint.splice_into(lane, tensor, start, end - start)
            except BlockingIOError:
                yield True
            except BrokenPipeError:
                return


def take(lane: int, out: torch.Tensor) -> None:
    """Fill `out` (uint8, 1-D, on CPU) with the next bytes of a lane. A neighbour of rank 0 only.

    Raises:
        LoadError: rank 0 has gone or sends nothing for PATIENCE_SECONDS.
    """
    view = memoryview(out.numpy())
    waiting = select.poll()
    waiting.register(lane, select.POLLIN)
    while view:
        if not waiting.poll(PATIENCE_SECONDS * 1000):
            raise LoadError(f"rank 0 has sent no weights for {PATIENCE_SECONDS} s. Remedy: see what it waits for.")
        num_bytes = os.readv(lane, [view])
        if num_bytes == 0:
            raise LoadError("rank 0 ended before it had sent all weights. Remedy: see its own message.")
        view = view[num_bytes:]


def _make(places: Sequence[int]) -> tuple[list[int], dict[int, int], Any]:
    """Make a lane for each place.

    Returns:
        Descriptors to close when the others have opened theirs, the lanes' near ends by place, and what the others need
        to find the far ends: a path under /proc, a token that proves that it leads here, and the paths of the far
        ends by place. Nothing, where nothing can be made.
    """
    ours: list[int] = []
    outgoing: dict[int, int] = {}
    far_ends: dict[int, str] = {}
    try:
        # Under its number somebody else's process on another machine may have a pipe too. Reading would steal from it;
        # a token in an anonymous file of this process can be looked at without harm.
        proof, token = os.memfd_create(NAME), secrets.token_bytes(TOKEN_BYTES)
    except (OSError, AttributeError):  # not Linux, or a Python that was built on an old one
        return ours, outgoing, None
    ours.append(proof)
    os.write(proof, token)
    with contextlib.suppress(OSError):  # too many open files: those of the first ranks are the ones that are needed
        for place in places:
            far, near = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            ours.append(far)
            outgoing[place], far_ends[place] = near, _path(far)
            _widen(near)
    return ours, outgoing, (_path(proof), token, far_ends)


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _widen(lane: int) -> None:
    import fcntl  # not on every system that this module is imported on

    with contextlib.suppress(OSError):  # a user who has many pipes gets small ones; slower, not wrong
        fcntl.fcntl(lane, fcntl.F_SETPIPE_SZ, LANE_BYTES)


def _open(proof: str, token: bytes, far_end: str | None) -> int | None:
    """Open the far end of this rank's lane; None where there is none or the paths do not lead to rank 0's process."""
    if far_end is None:
        return None
    try:
        # Anything else may lie under this path on another machine, and opening it may wait.
        if not str(Path(proof).readlink()).startswith(f"/memfd:{NAME}"):
            return None
        if Path(proof).read_bytes() != token:
            return None
        return os.open(far_end, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
