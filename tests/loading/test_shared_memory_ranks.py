"""Ranks of one node share rank 0's memory, which leaves nothing behind."""

import os
from pathlib import Path

from tests.ranks.harness import run_ranks


def write_and_read(hidden_rank):
    """Write on rank 0; return what each rank sees, and rank 0's open files."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_recipes.loading import shared_memory

    dist.init_process_group("gloo")
    if dist.get_rank() == hidden_rank:
        shared_memory._open = lambda *arguments: None
    memory, sharing = shared_memory.share_memory(1000)
    if dist.get_rank() == 0:
        memory.copy_(torch.arange(1000) % 251)
    dist.barrier()
    total = None if memory is None else memory.sum().item()
    del memory
    targets = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    opened = [target for target in targets if "hf_fsdp_recipes" in target]
    return total, sorted(sharing), opened


def test_ranks_see_what_rank_0_writes_and_nothing_is_left():
    total = sum(number % 251 for number in range(1000))
    assert run_ranks(write_and_read, 3, None) == [(total, [0, 1, 2], [])] * 3


def test_rank_that_does_not_see_it_is_told_apart():
    total = sum(number % 251 for number in range(1000))
    assert run_ranks(write_and_read, 2, 1) == [(total, [0], []), (None, [0], [])]
