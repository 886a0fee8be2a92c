"""Ranks of one node share memory, and no open file is left afterwards."""

import os
from pathlib import Path

import pytest

from tests.ranks.harness import run_ranks


def write_and_read(hidden_rank):
    """Write on rank 0; return what each rank sees, and rank 0's open files."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_recipes.loading import shared_memory

    dist.init_process_group("gloo")
    if dist.get_rank() == hidden_rank:
        shared_memory._open = lambda *arguments: None
    node = shared_memory.share_memory(1000)
    memory = node.values
    if dist.get_rank() == 0:
        memory.copy_(torch.arange(1000) % 251)
    dist.barrier()
    total = memory.sum().item() if dist.get_rank() in (0, *node.ranks[1:]) else None
    ranks, first_ranks = node.ranks, node.first_ranks
    del memory, node
    targets = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    opened = [target for target in targets if "hf_fsdp_recipes" in target]
    return total, ranks, first_ranks, opened


def test_ranks_see_what_rank_0_writes_and_nothing_is_left():
    total = sum(number % 251 for number in range(1000))
    assert run_ranks(write_and_read, 3, None) == [(total, [0, 1, 2], [0], [])] * 3


@pytest.mark.parametrize("hidden_rank", [0, 1])
def test_rank_that_cannot_open_it_is_told_apart(hidden_rank):
    found = run_ranks(write_and_read, 2, hidden_rank)
    assert [ranks for _, ranks, _, _ in found] == [[0], [1]]
    assert [first_ranks for _, _, first_ranks, _ in found] == [[0, 1], [0, 1]]
    assert found[0][0] == sum(number % 251 for number in range(1000))
