"""Where a bucket's bytes wait on their way: memory used again and again, shared by the ranks of rank 0's machine.

What rank 0 fills is an anonymous file that its neighbours open under /proc/<rank 0>/fd, so that their slices pass
through no socket. It has no name that could be left behind, and a container's small /dev/shm does not limit it. A rank
that cannot open it (another machine, another container) has slots of its own and takes its bytes over the process
group. `transfer.py` says over the process group when a slot may be read or written.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes import ranks

NUM_SLOTS = 2  # one is filled while the other is read
NAME = "hf_fsdp_recipes"
TOKEN_BYTES = 16


@dataclass(frozen=True)
class Slots:
    """Room for NUM_SLOTS buckets.

    Attributes:
        memory: (NUM_SLOTS, num_members, bytes) uint8.
        shared_with: the members that see rank 0's memory, rank 0 left out. Empty on a rank with slots of its own.
    """

    memory: torch.Tensor
    shared_with: frozenset[int] = frozenset()

    def of(self, bucket_number: int, position: int, num_bytes: int) -> torch.Tensor:
        """Return where one member's bytes of a bucket lie: (num_bytes,) uint8."""
        assert num_bytes <= self.memory.shape[-1]
        return self.memory[bucket_number % NUM_SLOTS, position, :num_bytes]


def prepare(members: Sequence[int], member_bytes: int, device: torch.device) -> Slots:
    """Make slots, one memory for rank 0 and those of the members that run beside it.

    Collective: every rank must call this.

    Args:
        members: global ranks, in the order of the cut.
        member_bytes: how much a bucket holds for one member at most.
        device: where the shards are. Only ranks whose shards are in host memory share.
    """
    member_bytes = -(-member_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = mmap.PAGESIZE + NUM_SLOTS * len(members) * member_bytes
    descriptor = mapped = offer = None
    if ranks.is_main() and device.type == "cpu":
        descriptor, mapped, offer = _make(num_bytes)
    offer = ranks.broadcast_object(offer)
    if offer is not None and not ranks.is_main() and ranks.rank() in members:
        mapped = _attach(offer[0], offer[1], num_bytes)
    sees = ranks.gather_objects(mapped is not None)
    if descriptor is not None:
        os.close(descriptor)  # the mappings keep the memory
    if mapped is None:
        # Rank 0 fills all members' places, on the host; the others have use for one place, where the shard is.
        places, home = (len(members), torch.device("cpu")) if ranks.is_main() else (1, device)
        memory = torch.empty((NUM_SLOTS, places, member_bytes), dtype=torch.uint8, device=home)
        return Slots(memory.expand(NUM_SLOTS, len(members), member_bytes))
    memory = torch.frombuffer(mapped, dtype=torch.uint8, offset=mmap.PAGESIZE)
    shared_with = frozenset(place for place, member in enumerate(members) if member != 0 and sees[member])
    return Slots(memory.view(NUM_SLOTS, len(members), member_bytes), shared_with)


def _make(num_bytes: int) -> tuple[Any, Any, Any]:
    """Make memory that others can open; return its descriptor, the mapping and where it is: three times None, if not."""
    descriptor = None
    try:
        descriptor = os.memfd_create(NAME)
        os.truncate(descriptor, num_bytes)
        mapped, token = mmap.mmap(descriptor, num_bytes), secrets.token_bytes(TOKEN_BYTES)
    except (OSError, AttributeError):  # forbidden here, too large for a limit, or not Linux
        if descriptor is not None:
            os.close(descriptor)
        return None, None, None
    mapped[:TOKEN_BYTES] = token
    return descriptor, mapped, (f"/proc/{os.getpid()}/fd/{descriptor}", token)


def _attach(path: str, token: bytes, num_bytes: int) -> Any:
    """Map rank 0's memory; None where the path leads to nothing, or to something else that has the same number."""
    try:
        if not str(Path(path).readlink()).startswith(
            f"/memfd:{NAME}"
        ):  # elsewhere it may be anything, and opening it may wait
            return None
        with Path(path).open("r+b") as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                return None
            mapped = mmap.mmap(file.fileno(), num_bytes)
    except OSError:
        return None
    return mapped if mapped[:TOKEN_BYTES] == token else None
