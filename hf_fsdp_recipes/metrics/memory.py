"""Measures the host and device memory of this process, in bytes."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
# For each version of cgroups: the files with limits, the file with the usage, and the prefix in memory.stat.
CGROUP_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
CGROUP_V2 = (("memory.max", "memory.high"), "memory.current", "")

COUNTERS = {  # {name in metrics.jsonl: name of a function in the device's module, such as torch.cuda}
    "device_valley_bytes": "memory_allocated",
    "device_peak_bytes": "max_memory_allocated",
    "device_reserved_peak_bytes": "max_memory_reserved",
}


def host_bytes() -> int:
    """Return this process's resident memory without the pages of memory-mapped files (RssAnon + RssShmem)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    )


def available_host_bytes() -> int:
    """Return the host memory that is left: on the node, or in this process's cgroup, as in Slurm jobs and containers."""
    left = [psutil.virtual_memory().available]
    memberships = Path("/proc/self/cgroup")
    lines = memberships.read_text().splitlines() if memberships.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            left += read_cgroups(CGROUPS, path, *CGROUP_V2)
        elif "memory" in controllers.split(","):
            left += read_cgroups(CGROUPS / "memory", path, *CGROUP_V1)
    return min(left)


def read_cgroups(
    root: Path, path: str, limit_files: Sequence[str], usage_file: str, prefix: str
) -> list[int]:
    """Return what is left in a cgroup and in each cgroup around it. Pages of files count as left."""
    found = []
    directory = root / path.lstrip("/")
    while directory.is_relative_to(root):
        for limit_file in limit_files:
            # Without a limit, the file is missing or has the word "max".
            with contextlib.suppress(OSError, ValueError):
                limit = int((directory / limit_file).read_text())
                usage = int((directory / usage_file).read_text())
                lines = (directory / "memory.stat").read_text().splitlines()
                stat = {name: int(number) for name, number in (line.split() for line in lines)}
                pages_of_files = [
                    stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive")
                ]
                found.append(limit - usage + sum(pages_of_files))
        directory = directory.parent
    return found


def pop_device_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated now (the "valley", if called between steps) and the peaks since the last call.

    All values are 0 if the device does not count its memory, as on CPU ranks.
    """
    module = torch.get_device_module(device)
    found = {name: getattr(module, counter, int)() for name, counter in COUNTERS.items()}
    getattr(module, "reset_peak_memory_stats", int)()
    return found
