"""Describes one rank's device, then times all-gather and all-reduce within its node and over all nodes.

`workers.Workers` runs this module in one process per rank. The rates are bus bandwidths as nccl-tests defines them: they
show the bandwidth of the slowest link and can be compared across collectives and group sizes.

Source: nccl-tests `doc/PERFORMANCE.md`: over n ranks, all-gather moves (n-1)/n of the buffer's bytes, all-reduce 2(n-1)/n.
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hf_fsdp_recipes.patches.torch import wait_for_gloo_at_exit
from hf_fsdp_recipes.tools.preflight.bandwidth_advice import Bandwidths, WorkerRates
from hf_fsdp_recipes.tools.preflight.devices import DeviceInfo
from hf_fsdp_recipes.tools.preflight.rendezvous import ParticipantInfo, attempt

LONG_ENOUGH_SECONDS = 0.15  # in a transfer that takes this long, latency no longer dominates
NUM_REPEATS = 3


# Dtype, buffer sizes in bytes, rows of the square matrix, and the maximum number of matrix products to time. A GPU computes
# many products, so that its clocks settle under load.
CPU_WORKLOAD = (torch.float32, (1 << 20, 1 << 22, 1 << 24, 1 << 26), 1024, NUM_REPEATS)
ACCELERATOR_WORKLOAD = (torch.bfloat16, (1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 31), 8192, 200)
PRODUCTS_SECONDS = 1.0  # target time for all products; a slow device computes fewer
NUM_PAIR_ROUNDS = 3  # so that a node that pauses in one round (odd number of nodes) still gets two partners


def main(info: ParticipantInfo, prefix: str, local_rank: int, on_cpu: bool) -> None:
    """Report the device, wait for the request to measure, then report the rates, all through the preflight's TCPStore."""
    tcp_store = dist.TCPStore(info.master_address, info.master_port, is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(prefix, tcp_store)
    rank = info.node_rank * info.ranks_per_node + local_rank
    store.set(f"device/{rank}", json.dumps(attempt(lambda: describe(choose_device(local_rank, on_cpu)))))
    timeout = timedelta(seconds=float(store.get("measure")))

    def work() -> WorkerRates:
        device, world_size = choose_device(local_rank, on_cpu), info.num_nodes * info.ranks_per_node
        backend = dist.get_default_backend_for_device(device)
        wait_for_gloo_at_exit()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        return measure(device, info)

    store.set(f"rates/{rank}", json.dumps(attempt(work)))


def choose_device(local_rank: int, on_cpu: bool) -> torch.device:
    """Select and return this rank's device; the CPU if requested or if there is no accelerator."""
    found = None if on_cpu else torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    if local_rank < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local_rank)
    return torch.device(found.type, local_rank)


def describe(device: torch.device) -> DeviceInfo:
    """Return a device's kind, name and memory (0 if unknown), and the number of devices on its node."""
    count = 0 if device.type == "cpu" else torch.accelerator.device_count()
    name, free_bytes, total_bytes = "none", 0, 0
    if device.type == "cpu":
        name = "cpu"
    elif device.index < count:
        module = torch.get_device_module(device)
        name = module.get_device_name(device)
        if hasattr(module, "mem_get_info"):  # not on Gaudi
            free_bytes, total_bytes = module.mem_get_info(device)
    return {"kind": device.type, "count": count, "name": name, "free_bytes": free_bytes, "total_bytes": total_bytes}


def measure(device: torch.device, info: ParticipantInfo) -> WorkerRates:
    """Measure bandwidth within and between nodes, and the speed of a matrix product.

    Collective: the workers of all nodes must call this.
    """
    links = {}
    if info.ranks_per_node > 1:
        node_group, _ = dist.new_subgroups(info.ranks_per_node)
        links["within"] = measure_bus_bandwidths(node_group, device)
    if info.num_nodes > 1:
        links["between"] = measure_bus_bandwidths(dist.group.WORLD, device)
    partners = measure_pairs(device, info) if info.num_nodes > 2 else {}
    flops_per_second = measure_matrix_product(device)
    dist.barrier()
    dist.destroy_process_group()
    return {"links": links, "partners": partners, "flops_per_second": flops_per_second}


def measure_pairs(device: torch.device, info: ParticipantInfo) -> dict[str, float]:
    """Measure all-gather with several partner nodes; return the bandwidth for each partner's node number.

    All pairs of a round measure at the same time. Collective: the workers of all nodes must call this.
    """
    rates = {}
    for pairs in pair_nodes(info.num_nodes):
        for pair in pairs:
            if info.node_rank in pair:
                ranks = [node * info.ranks_per_node + local for node in pair for local in range(info.ranks_per_node)]
                group = dist.new_group(ranks, use_local_synchronization=True)
                (partner,) = set(pair) - {info.node_rank}
                rates[str(partner)] = measure_all_gather(group, device)
                # Destroy the group now. Both nodes of a pair must derive the same group name, and torch 2.13 derives it
                # from the ranks and the number of existing groups, which would otherwise differ after a round in which
                # a node had no partner.
                dist.destroy_process_group(group)
        dist.barrier()
    return rates


def pair_nodes(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of node pairs, as in a tournament. With three or more nodes, each node gets at least two partners."""
    seats = list(range(num_nodes + num_nodes % 2))  # with an odd number of nodes, the last seat stays empty
    rounds = []
    for _ in range(min(NUM_PAIR_ROUNDS, len(seats) - 1)):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes])
        seats[1:] = [seats[-1], *seats[1:-1]]
    return rounds


def measure_bus_bandwidths(group: dist.ProcessGroup, device: torch.device) -> Bandwidths:
    """Return the bus bandwidth of each collective in bytes per second. Collective: all ranks of the group must call this."""
    all_reduce = partial(dist.all_reduce, group=group)
    return {
        "all_gather": measure_all_gather(group, device),
        "all_reduce": 2 * _find_bandwidth(all_reduce, group, device),
    }


def measure_all_gather(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the bus bandwidth of all-gather in bytes per second. Collective: all ranks of the group must call this."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(buffer: torch.Tensor) -> None:
        dist.all_gather_into_tensor(buffer, buffer.chunk(num_ranks)[rank].clone(), group=group)

    return _find_bandwidth(all_gather, group, device)


def _find_bandwidth(
    collective: Callable[[torch.Tensor], None], group: dist.ProcessGroup, device: torch.device
) -> float:
    """Time a collective on buffers of growing size; return its highest bus bandwidth in bytes per second.

    This assumes that, over n ranks, the collective moves (n-1)/n of its buffer.
    """
    num_ranks = dist.get_world_size(group)
    dtype, buffer_sizes, _, _ = _choose_workload(device)
    rate = 0.0
    for num_bytes in buffer_sizes:
        buffer = torch.zeros(num_bytes // dtype.itemsize // num_ranks * num_ranks, dtype=dtype, device=device)
        seconds = _time_call(partial(collective, buffer), device, group)
        rate = max(rate, (num_ranks - 1) / num_ranks * buffer.nbytes / seconds)
        if seconds > LONG_ENOUGH_SECONDS:
            break
    return rate


def measure_matrix_product(device: torch.device) -> float:
    """Return the FLOP/s of a square matrix product, in bf16 on an accelerator."""
    dtype, _, num_rows, max_repeats = _choose_workload(device)
    # Random values, because a product of ones would draw less power than one of real data.
    matrix = torch.randn(num_rows, num_rows, dtype=dtype, device=device)
    multiply = partial(torch.matmul, matrix, matrix)
    seconds = _time_call(multiply, device, num_repeats=1)
    num_repeats = min(max_repeats, max(NUM_REPEATS, int(PRODUCTS_SECONDS / seconds)))
    return 2 * num_rows**3 / _time_call(multiply, device, num_repeats=num_repeats)


def _choose_workload(device: torch.device) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    return CPU_WORKLOAD if device.type == "cpu" else ACCELERATOR_WORKLOAD


def _time_call(
    work: Callable[[], object],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    num_repeats: int = NUM_REPEATS,
) -> float:
    """Return the mean seconds per call, on the slowest rank if a group is given."""
    work()
    synchronize(device)
    if group is not None:
        dist.barrier(group=group)
    started = time.perf_counter()
    for _ in range(num_repeats):
        work()
    synchronize(device)
    seconds = torch.tensor((time.perf_counter() - started) / num_repeats, device=device)
    if group is not None:
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device is done. On the CPU, return immediately."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main(ParticipantInfo(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
