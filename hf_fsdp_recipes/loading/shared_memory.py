"""Creates memory that the ranks of a node share. It has no name in a file system, so it is freed when the ranks exit.

The first rank of a node creates an anonymous file in memory, and the node's other ranks open it through /proc. Ranks that cannot
open it, such as those in another container, get separate memory.

Source: memfd_create(2).
"""

import mmap
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_fsdp_recipes import distributed

_KEY_BYTES = 4096  # one page, for a random key that identifies the memory


@dataclass(frozen=True)
class NodeMemory:
    """Memory of one node, and the ranks that see it."""

    values: torch.Tensor  # uint8
    ranks: Sequence[int]  # the ranks that share it, the node's first rank first
    first_ranks: Sequence[int]  # the first rank of each node; global rank 0 first


def share_memory(num_bytes: int) -> NodeMemory:
    """Return memory that the ranks of this node share. Collective: every rank must call this."""
    key = uuid.uuid4().bytes
    descriptor = _create(key)
    address = None if descriptor is None else f"/proc/{os.getpid()}/fd/{descriptor}"
    ranks = distributed.gather_objects((distributed.node_id(), address, key))
    own_rank = distributed.rank()
    nodes = [node for node, *_ in ranks]
    first_of_node = nodes.index(nodes[own_rank])
    _, address, key = ranks[first_of_node]
    memory = None if address is None else _open(Path(address), num_bytes, key)
    has_opened = distributed.gather_objects(memory is not None)
    if descriptor is not None:
        os.close(descriptor)  # the memory lasts as long as a rank maps it
    # A rank shares the memory of its node's first rank if both have opened it.
    owners = [nodes.index(node) for node in nodes]
    owners = [owner if has_opened[owner] and has_opened[rank] else rank for rank, owner in enumerate(owners)]
    sharing = [rank for rank, owner in enumerate(owners) if owner == owners[own_rank]]
    if memory is None or owners[own_rank] != first_of_node:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
    return NodeMemory(memory, sharing, sorted(set(owners)))


def _create(key: bytes) -> int | None:
    """Create a file in memory that holds only a key, and return its descriptor."""
    try:
        descriptor = os.memfd_create("hf_fsdp_recipes")
        os.write(descriptor, key)
        return descriptor
    except OSError:
        return None


def _open(path: Path, num_bytes: int, key: bytes) -> torch.Tensor | None:
    """If an in-memory file holds the key, extend the file to its full size and return its mapping; else return None."""
    try:
        with path.open("r+b") as file:
            if file.read(len(key)) != key:
                return None
            os.posix_fallocate(file.fileno(), 0, _KEY_BYTES + num_bytes)
            memory = mmap.mmap(file.fileno(), _KEY_BYTES + num_bytes)
            return torch.frombuffer(memory, dtype=torch.uint8)[_KEY_BYTES:]
    except (OSError, ValueError):
        return None
