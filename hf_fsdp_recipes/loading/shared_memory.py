"""Memory that the ranks of one node share, without a name that could outlive them.

Global rank 0 creates an anonymous file and the other ranks of its node open it through /proc. Ranks that cannot, such as those
of another node or container, are told apart by the attempt.

Source: memfd_create(2).
"""

import mmap
import os
import uuid
from pathlib import Path

import torch

from hf_fsdp_recipes import distributed

_KEY_BYTES = 4096  # for a random key that identifies the memory, one page


def share_memory(num_bytes: int) -> tuple[torch.Tensor | None, set[int]]:
    """Share memory between global rank 0 and the ranks that see it. Collective: every rank must call this.

    Returns:
        The memory, uint8 of `num_bytes`, or None if this rank cannot see rank 0's; and the ranks that can. Rank 0 always
        has memory, shared or not.
    """
    key = uuid.uuid4().bytes
    memory, descriptor = _create(num_bytes, key) if distributed.is_main() else (None, None)
    address = None if descriptor is None else f"/proc/{os.getpid()}/fd/{descriptor}"
    address, key = distributed.broadcast_object((address, key))
    if not distributed.is_main() and address is not None:
        memory = _open(Path(address), num_bytes, key)
    seen = distributed.gather_objects(memory is not None)
    if descriptor is not None:
        os.close(descriptor)  # the memory lasts as long as a rank maps it
    return memory, {rank for rank, sees in enumerate(seen) if sees}


def _create(num_bytes: int, key: bytes) -> tuple[torch.Tensor, int | None]:
    try:
        descriptor = os.memfd_create("hf_fsdp_recipes")  # Linux only
    except (OSError, AttributeError):
        return torch.empty(num_bytes, dtype=torch.uint8), None
    try:
        os.posix_fallocate(descriptor, 0, _KEY_BYTES + num_bytes)
        memory = mmap.mmap(descriptor, _KEY_BYTES + num_bytes)
    except OSError:
        os.close(descriptor)
        return torch.empty(num_bytes, dtype=torch.uint8), None
    memory[: len(key)] = key
    return _view(memory), descriptor


def _open(path: Path, num_bytes: int, key: bytes) -> torch.Tensor | None:
    try:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), _KEY_BYTES + num_bytes)
    except (OSError, ValueError):
        return None
    return _view(memory) if memory[: len(key)] == key else None


def _view(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)[_KEY_BYTES:]
