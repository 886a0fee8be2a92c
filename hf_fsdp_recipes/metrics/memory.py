"""Measures the host and device memory of this process, in bytes."""

from pathlib import Path

import torch


def host_bytes(process: int | str = "self") -> int:
    """Return a process's anonymous resident memory (RssAnon + RssShmem); pages of memory-mapped files do not count."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def pop_device_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated now (between steps: the valley), and the peaks since the last call; zeros on a CPU rank."""
    names = ("device_valley_bytes", "device_peak_bytes", "device_reserved_peak_bytes")
    if device.type == "cpu":
        return dict.fromkeys(names, 0)
    accelerator = torch.accelerator
    found = accelerator.memory_allocated(), accelerator.max_memory_allocated(), accelerator.max_memory_reserved()
    accelerator.reset_peak_memory_stats()
    return dict(zip(names, found, strict=True))
