"""One worker: describes its device, then times all-gather and all-reduce within its node and over all nodes.

Started by `workers.Workers`. The rates are bus bandwidths as nccl-tests defines them: those of the slowest link,
comparable between collectives and group sizes.

Source: nccl-tests `doc/PERFORMANCE.md`: all-gather moves (n-1)/n of the buffer's bytes, all-reduce 2(n-1)/n.
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hf_fsdp_recipes.tools.preflight.bandwidth_advice import Bandwidths, WorkerRates
from hf_fsdp_recipes.tools.preflight.devices import DeviceInfo
from hf_fsdp_recipes.tools.preflight.rendezvous import ParticipantInfo, attempt

LONG_ENOUGH_SECONDS = 0.15  # latency no longer dominates a transfer that takes this long
NUM_REPEATS = 3


# Dtype, sizes of the buffers, and rows of the matrix.
CPU_WORKLOAD = (torch.float32, (1 << 20, 1 << 22, 1 << 24, 1 << 26), 1024)
ACCELERATOR_WORKLOAD = (torch.bfloat16, (1 << 24, 1 << 26, 1 << 28), 8192)


def main(info: ParticipantInfo, prefix: str, local_rank: int, on_cpu: bool) -> None:
    """Report the device, wait for the request to measure, and report the rates, all on the preflight's store."""
    tcp_store = dist.TCPStore(info.master_address, info.master_port, is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(prefix, tcp_store)
    rank = info.node_rank * info.ranks_per_node + local_rank
    store.set(f"device/{rank}", json.dumps(attempt(lambda: describe(choose_device(local_rank, on_cpu)))))
    timeout = timedelta(seconds=float(store.get("measure")))

    def work() -> WorkerRates:
        device, world_size = choose_device(local_rank, on_cpu), info.num_nodes * info.ranks_per_node
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        return measure(device, info)

    store.set(f"rates/{rank}", json.dumps(attempt(work)))


def choose_device(local_rank: int, on_cpu: bool) -> torch.device:
    """Select and return this rank's device; the CPU if asked for or if there is no accelerator."""
    found = None if on_cpu else torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    if local_rank < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local_rank)
    return torch.device(found.type, local_rank)


def describe(device: torch.device) -> DeviceInfo:
    """Return kind, count, name and memory of a device; zeros for what is unknown."""
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
    flops_per_second = measure_matrix_product(device)
    dist.barrier()
    dist.destroy_process_group()
    return {"links": links, "flops_per_second": flops_per_second}


def measure_bus_bandwidths(group: dist.ProcessGroup, device: torch.device) -> Bandwidths:
    """Return the bus bandwidth of each collective in bytes per second. Collective: all ranks of the group must call this."""
    num_ranks = dist.get_world_size(group)
    dtype, buffer_sizes, _ = _choose_workload(device)

    def all_gather(buffer: torch.Tensor) -> None:
        shard = buffer.chunk(num_ranks)[dist.get_rank(group)]
        dist.all_gather_into_tensor(buffer, shard.clone(), group=group)

    def all_reduce(buffer: torch.Tensor) -> None:
        dist.all_reduce(buffer, group=group)

    def find_rate(collective: Callable[[torch.Tensor], None], num_passes: int) -> float:
        rate = 0.0
        for num_bytes in buffer_sizes:
            buffer = torch.zeros(num_bytes // dtype.itemsize // num_ranks * num_ranks, dtype=dtype, device=device)
            seconds = _time_call(partial(collective, buffer), device, group)
            rate = max(rate, num_passes * (num_ranks - 1) / num_ranks * buffer.nbytes / seconds)
            if seconds > LONG_ENOUGH_SECONDS:
                break
        return rate

    return {"all_gather": find_rate(all_gather, 1), "all_reduce": find_rate(all_reduce, 2)}


def measure_matrix_product(device: torch.device) -> float:
    """Return the FLOP/s of a square matrix product, in bf16 on an accelerator."""
    dtype, _, num_rows = _choose_workload(device)
    matrix = torch.ones(num_rows, num_rows, dtype=dtype, device=device)
    return 2 * num_rows**3 / _time_call(lambda: matrix @ matrix, device)


def _choose_workload(device: torch.device) -> tuple[torch.dtype, tuple[int, ...], int]:
    return CPU_WORKLOAD if device.type == "cpu" else ACCELERATOR_WORKLOAD


def _time_call(work: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Return the mean seconds per call, on the slowest rank if a group is given."""
    work()
    _synchronize(device)
    if group is not None:
        dist.barrier(group=group)
    started = time.perf_counter()
    for _ in range(NUM_REPEATS):
        work()
    _synchronize(device)
    seconds = torch.tensor((time.perf_counter() - started) / NUM_REPEATS, device=device)
    if group is not None:
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main(ParticipantInfo(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
