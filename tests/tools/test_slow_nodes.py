"""A slow node is found by measuring pairs: which nodes are paired, and which node is named."""

from itertools import pairwise

import pytest
import torch

from hf_fsdp_recipes.tools.preflight import bandwidth
from hf_fsdp_recipes.tools.preflight.bandwidth import ACCELERATOR_WORKLOAD, pair_nodes
from hf_fsdp_recipes.tools.preflight.bandwidth_advice import describe, find_slow


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 6, 63, 64])
def test_each_node_has_different_partners_and_one_at_a_time(num_nodes):
    partners = {node: set() for node in range(num_nodes)}
    for pairs in pair_nodes(num_nodes):
        assert len(pairs) == num_nodes // 2
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
        for first, second in pairs:
            assert first < second and second not in partners[first]
            partners[first].add(second)
            partners[second].add(first)
    assert all(len(found) >= min(2, num_nodes - 1) for found in partners.values())


def test_all_gather_is_measured_at_one_to_two_gigabytes():
    _, buffer_bytes, _, _ = ACCELERATOR_WORKLOAD
    assert buffer_bytes[-2:] == (1 << 30, 2 << 30)


def test_no_transfer_is_much_longer_than_the_one_before():
    """A slow network would otherwise need minutes for one size."""
    for _, sizes, _, _ in (bandwidth.CPU_WORKLOAD, ACCELERATOR_WORKLOAD):
        assert all(second <= 4 * first for first, second in pairwise(sizes))


@pytest.mark.parametrize(("seconds", "num_repeats"), [(0.4, 3), (0.25, 4), (0.01, 100), (0.0018, 200)])
def test_slow_device_computes_fewer_products(monkeypatch, seconds, num_repeats):
    timed = []

    def time_call(work, device, group=None, num_repeats=3):
        timed.append(num_repeats)
        return seconds

    monkeypatch.setattr(bandwidth, "_choose_workload", lambda device: (torch.float32, (), 8, 200))
    monkeypatch.setattr(bandwidth, "_time_call", time_call)
    assert bandwidth.measure_matrix_product(torch.device("cpu")) == pytest.approx(2 * 8**3 / seconds)
    assert timed == [1, num_repeats]


def make_rates(num_nodes, link_rate, flops=lambda rank: 600e12):
    """Return what two ranks of each node measure, given the rate of each pair of nodes."""
    nodes = []
    for node in range(num_nodes):
        pairs = [set(pair) for pairs in pair_nodes(num_nodes) for pair in pairs if node in pair]
        partners = {str(*(pair - {node})): link_rate(*pair) for pair in pairs}
        nodes.append(
            [{"links": {}, "partners": partners, "flops_per_second": flops(2 * node + local)} for local in range(2)]
        )
    return nodes


NAMES = [f"node {index}" for index in range(7)]


@pytest.mark.parametrize("num_nodes", [3, 4, 7])
@pytest.mark.parametrize("slow", [0, 2])
def test_slow_node_is_named_and_its_partners_are_not(num_nodes, slow):
    rates = make_rates(num_nodes, lambda *pair: 9e9 if slow in pair else 45e9)
    rows = describe({}, {}, rates, NAMES[:num_nodes], 2)
    assert rows == [
        (
            "warning",
            f"node {slow} is slow: all-gather with one other node reaches 9.00 GB/s at most, but 45.00 GB/s on a typical node. "
            f"Check its network ports, or leave it out (sbatch --exclude).",
        )
    ]


def test_slow_rank_is_named_and_small_differences_are_not():
    rates = make_rates(
        4, lambda *pair: 45e9 - sum(pair) * 1e9, lambda rank: 300e12 if rank == 5 else 600e12 + rank * 1e12
    )
    (warning,) = find_slow(rates, NAMES[:4])
    assert warning.startswith("rank 5 of node 2 computes slowly: 300.00 TFLOP/s, but 60")
    assert find_slow(make_rates(2, lambda *pair: 1.0), NAMES[:2]) == []
