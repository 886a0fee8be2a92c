"""Measures the host and device memory of this process, in bytes."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")


class CgroupNames(NamedTuple):
    """Names that differ between the versions of cgroups."""

    limit_files: tuple[str, ...]
    usage_file: str
    prefix: str  # of the fields in memory.stat


CGROUP_V1 = CgroupNames(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
CGROUP_V2 = CgroupNames(("memory.max", "memory.high"), "memory.current", "")

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
    kilobytes = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024


def available_host_bytes() -> int:
    """Return the host memory that is left.

    It is limited by the node, or by this process's cgroup, as in Slurm jobs and containers.
    """
    left = [psutil.virtual_memory().available]
    memberships = Path("/proc/self/cgroup")
    if memberships.exists():
        for line in memberships.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                left += read_cgroups(CGROUPS, path, CGROUP_V2)
            elif "memory" in controllers.split(","):
                left += read_cgroups(CGROUPS / "memory", path, CGROUP_V1)
    return min(left)


def read_cgroups(root: Path, path: str, names: CgroupNames) -> list[int]:
    """Return what is left in a cgroup and in each cgroup around it. Pages of files count as left.

    Args:
        root: the directory of all cgroups.
        path: the cgroup's path in it, as in /proc/self/cgroup.
        names: those of the cgroups' version.
    """
    left = []
    directory = root / path.lstrip("/")
    while directory.is_relative_to(root):
        for limit_file in names.limit_files:
            # Without a limit, the file is missing or has the word "max".
            with suppress(OSError, ValueError):
                limit = int((directory / limit_file).read_text())
                usage = int((directory / names.usage_file).read_text())
                text = (directory / "memory.stat").read_text()
                stat = dict(line.split() for line in text.splitlines())
                for kind in ("active_file", "inactive_file"):
                    usage -= int(stat.get(f"{names.prefix}{kind}", 0))
                left.append(limit - usage)
        directory = directory.parent
    return left


def pop_device_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated now (the "valley", if called between steps) and the peaks.

    The peaks are those since the last call. All values are 0 if the device does not count its
    memory, as on CPU ranks.
    """
    module = torch.get_device_module(device)
    counts = {}
    for name, counter in COUNTERS.items():
        counts[name] = getattr(module, counter)() if hasattr(module, counter) else 0
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()
    return counts
