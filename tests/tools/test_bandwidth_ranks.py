"""Bandwidth between pairs of nodes; gloo ranks stand for the nodes, and one has a slow network."""

import time

import torch
import torch.distributed as dist

from hf_fsdp_recipes.tools.preflight import bandwidth
from hf_fsdp_recipes.tools.preflight.bandwidth_advice import find_slow
from hf_fsdp_recipes.tools.preflight.rendezvous import ParticipantInfo
from tests.ranks.harness import run_ranks

SLOW = 1


def _measure(num_nodes):
    gather = dist.all_gather_into_tensor

    dist.init_process_group("gloo")
    seconds = 0.4 if dist.get_rank() == SLOW else 0.1  # long, so that other processes on this machine hardly matter

    def delayed_gather(*arguments, **options):
        time.sleep(seconds)
        return gather(*arguments, **options)

    dist.all_gather_into_tensor = delayed_gather
    bandwidth.CPU_WORKLOAD = (torch.float32, (1 << 20,), 64, 1)
    info = ParticipantInfo(dist.get_rank(), num_nodes, 1, "127.0.0.1", 0)
    return bandwidth.measure(torch.device("cpu"), info)


def test_node_with_a_slow_network_is_found():
    num_nodes = 5
    found = run_ranks(_measure, num_nodes, num_nodes)
    assert all(len(rates["partners"]) >= 2 and rates["links"].keys() == {"between"} for rates in found)
    for node, rates in enumerate(found):
        for partner, rate in rates["partners"].items():
            assert found[int(partner)]["partners"][str(node)] == rate  # both have the rate of the slower node
    for rates in found:
        rates["flops_per_second"] = 1.0
    (warning,) = find_slow([[rates] for rates in found], [f"node {node}" for node in range(num_nodes)])
    assert warning.startswith(f"node {SLOW} is slow: ")
