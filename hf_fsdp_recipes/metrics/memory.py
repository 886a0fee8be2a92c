"""Measures the host and device memory of this process, in bytes."""

from pathlib import Path

import torch

COUNTERS = {  # {name in metrics.jsonl: name of a function in the device's module, such as torch.cuda}
    "device_valley_bytes": "memory_allocated",
    "device_peak_bytes": "max_memory_allocated",
    "device_reserved_peak_bytes": "max_memory_reserved",
}


def host_bytes() -> int:
    """Return this process's resident memory without the pages of memory-mapped files (RssAnon + RssShmem)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def pop_device_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated now (the "valley", if called between steps) and the peaks since the last call.

    All values are 0 if the device does not count its memory, as on CPU ranks.
    """
    module = torch.get_device_module(device)
    found = {name: getattr(module, counter, int)() for name, counter in COUNTERS.items()}
    getattr(module, "reset_peak_memory_stats", int)()
    return found
