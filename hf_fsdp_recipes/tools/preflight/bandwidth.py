"""One measuring rank: looks at its device, then all-gathers and all-reduces within its node and over all nodes.

Started by `workers`, talks to it over an inherited socket. The figure is nccl-tests' bus bandwidth: what the slowest
link carried, comparable between collectives and group sizes.

Source: nccl-tests `doc/PERFORMANCE.md`: all-gather (n-1)/n, all-reduce 2(n-1)/n of the bytes of the whole.
"""

import datetime
import sys
import time
from collections.abc import Callable
from socket import socket
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes.tools.preflight.jsonl_socket import Lines

ENOUGH_SECONDS = 0.15  # a transfer that takes so long is no longer ruled by latency
NUM_REPEATS = 3
SIZES_BYTES = {"cpu": (1 << 20, 1 << 22, 1 << 24, 1 << 26), "accelerator": (1 << 24, 1 << 26, 1 << 28)}
MATRIX_ROWS = {"cpu": 1024, "accelerator": 8192}


def main(socket_number: int, listener_number: int, local_rank: int, on_cpu: bool) -> None:
    """Report the device, wait for the order, report what was measured."""
    lines = Lines(socket(fileno=socket_number))
    try:
        device = choose_device(local_rank, on_cpu)
        lines.send(describe(device))
        lines.send(measure(device, listener_number, lines.receive(time.monotonic() + 3600)))
    except ConnectionError:
        return  # nobody waits any more
    except Exception as error:
        text = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        lines.send({"fault": text[0][:300].rstrip(".")})


def choose_device(local_rank: int, on_cpu: bool) -> torch.device:
    """Return this rank's device; the CPU where there is nothing else or it was asked for."""
    found = None if on_cpu else torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    device = torch.device(found.type, local_rank)
    if local_rank < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local_rank)
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """Return kind, count, name and memory of a device, in bytes; zeros for what is not known."""
    if device.type == "cpu":
        return {"kind": "cpu", "count": 0, "name": "cpu", "free_bytes": 0, "total_bytes": 0}
    count = torch.accelerator.device_count()
    module = torch.get_device_module(device)
    if device.index >= count:
        return {"kind": device.type, "count": count, "name": "none", "free_bytes": 0, "total_bytes": 0}
    # Gaudi's module need not have it; zeros mean that memory is not judged.
    free_bytes, total_bytes = module.mem_get_info(device) if hasattr(module, "mem_get_info") else (0, 0)
    name = module.get_device_name(device)
    return {"kind": device.type, "count": count, "name": name, "free_bytes": free_bytes, "total_bytes": total_bytes}


def measure(device: torch.device, listener_number: int, order: dict[str, Any]) -> dict[str, Any]:
    """Measure with all ranks. Collective over the ranks of all nodes.

    Returns:
        within, between: bytes a second of all_gather and all_reduce, or None where there is nobody to measure with.
        flops_per_second: of a matrix product, which is what transfers have to hide behind.
    """
    timeout = datetime.timedelta(seconds=order["timeout_seconds"])
    world_size = order["num_nodes"] * order["ranks_per_node"]
    listening = {"master_listen_fd": listener_number} if order["rank"] == 0 else {}
    store = dist.TCPStore(
        order["address"],
        order["port"],
        is_master=order["rank"] == 0,
        timeout=timeout,
        wait_for_workers=False,
        **listening,
    )
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=order["rank"], world_size=world_size, timeout=timeout)
    results: dict[str, Any] = {"within": None, "between": None}
    if order["ranks_per_node"] > 1:
        within, _ = dist.new_subgroups(order["ranks_per_node"])
        results["within"] = bus_bandwidths(within, device)
    if order["num_nodes"] > 1:
        results["between"] = bus_bandwidths(dist.group.WORLD, device)
    results["flops_per_second"] = matrix_product_rate(device)
    dist.barrier()
    dist.destroy_process_group()
    return results


def bus_bandwidths(group: Any, device: torch.device) -> dict[str, float]:
    """Return the bus bandwidth of all-gather and all-reduce in bytes a second. Collective over the group."""
    ranks = dist.get_world_size(group)
    sizes = SIZES_BYTES["cpu" if device.type == "cpu" else "accelerator"]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def all_gather(whole: torch.Tensor) -> None:
        part = whole.chunk(ranks)[dist.get_rank(group)]
        dist.all_gather_into_tensor(whole, part.clone(), group=group)

    def all_reduce(whole: torch.Tensor) -> None:
        dist.all_reduce(whole, group=group)

    rates = {}
    for name, collective, share in (("all_gather", all_gather, 1.0), ("all_reduce", all_reduce, 2.0)):
        rates[name] = 0.0
        for num_bytes in sizes:
            whole = torch.zeros(num_bytes // dtype.itemsize // ranks * ranks, dtype=dtype, device=device)
            seconds = _time_together(collective, whole, group)
            moved_bytes = share * (ranks - 1) / ranks * whole.numel() * dtype.itemsize
            rates[name] = max(rates[name], moved_bytes / seconds)
            if seconds > ENOUGH_SECONDS:
                break
    return rates


def _time_together(collective: Callable[[torch.Tensor], None], whole: torch.Tensor, group: Any) -> float:
    """Return the seconds that one call takes on the slowest rank; the same on all. Collective over the group."""
    collective(whole)
    _synchronize(whole.device)
    dist.barrier(group=group)
    started = time.perf_counter()
    for _ in range(NUM_REPEATS):
        collective(whole)
    _synchronize(whole.device)
    seconds = torch.tensor((time.perf_counter() - started) / NUM_REPEATS, device=whole.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


def matrix_product_rate(device: torch.device) -> float:
    """Return the floating-point operations a second of a square matrix product, bf16 on an accelerator."""
    kind = "cpu" if device.type == "cpu" else "accelerator"
    rows, dtype = MATRIX_ROWS[kind], torch.float32 if kind == "cpu" else torch.bfloat16
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)
    matrix @ matrix
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(NUM_REPEATS):
        matrix @ matrix
    _synchronize(device)
    return NUM_REPEATS * 2 * rows**3 / (time.perf_counter() - started)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
