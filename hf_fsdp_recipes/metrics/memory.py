"""Measures the host and device memory of this process, in bytes."""

import re
from contextlib import suppress
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
# (file of a limit, file of the usage, prefix of the fields in memory.stat)
LIMITS = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # cgroups of version 1
)
# {name in metrics.jsonl: name of a function in the device's module, such as torch.cuda}
COUNTERS = {
    "device_valley_bytes": "memory_allocated",
    "device_peak_bytes": "max_memory_allocated",
    "device_reserved_peak_bytes": "max_memory_reserved",
}


def host_bytes() -> int:
    """Return this process's resident memory without the pages of memory-mapped files.

    It is the sum of the kernel's RssAnon and RssShmem.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(map(int, re.findall(r"(?m)^Rss(?:Anon|Shmem):\s*(\d+) kB", status)))


def available_host_bytes() -> int:
    """Return the host memory that is left.

    It is limited by the node, or by this process's cgroup, as in Slurm jobs and containers.
    """
    left = [psutil.virtual_memory().available]
    memberships = Path("/proc/self/cgroup")
    if memberships.exists():
        for line in memberships.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # Version 1 has a hierarchy for each set of controllers. That of version 2 has no name.
            left += read_cgroups(CGROUPS / controllers, path)
    return min(left)


def read_cgroups(root: Path, path: str) -> list[int]:
    """Return what is left in a cgroup and in each cgroup around it. Pages of files count as left.

    Args:
        root: the directory of all cgroups.
        path: the cgroup's path in it, as in /proc/self/cgroup.
    """
    left = []
    directory = root / path.lstrip("/")
    while directory.is_relative_to(root):
        for limit_file, usage_file, prefix in LIMITS:
            # Without a limit, the file is missing or has the word "max".
            with suppress(OSError, ValueError):
                limit = int((directory / limit_file).read_text())
                usage = int((directory / usage_file).read_text())
                stat = (directory / "memory.stat").read_text()
                cached = re.findall(rf"(?m)^{prefix}(?:in)?active_file (\d+)", stat)
                left.append(limit - usage + sum(map(int, cached)))
        directory = directory.parent
    return left


def pop_device_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated now (the "valley", if called between steps) and the peaks.

    The peaks are those since the last call. All values are 0 if the device does not count its
    memory, as on CPU ranks.
    """
    module = torch.get_device_module(device)
    counts = {name: getattr(module, counter, lambda: 0)() for name, counter in COUNTERS.items()}
    getattr(module, "reset_peak_memory_stats", lambda: None)()
    return counts
