"""Where every figure comes from: host and device bytes, seconds, tokens. Reads; keeps no history.

Host memory is anonymous (RssAnon + RssShmem): pages of memory-mapped files belong to the kernel's cache.
"""

import threading
import time
from pathlib import Path
from typing import Any

import torch


def host_bytes() -> int:
    """Return this process's anonymous resident memory in bytes."""
    total = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total


def device_bytes() -> tuple[int, int]:
    """Return (allocated now, peak allocated) on this rank's accelerator in bytes; zeros on CPU ranks."""
    if not torch.accelerator.is_available():
        return 0, 0
    return torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()


class HostPeak:
    """Sample host memory in a thread while a block runs.

    Attributes:
        before_bytes, peak_bytes, after_bytes: anonymous resident memory of this process.
        seconds: how long the block took.
    """

    def __init__(self, interval_seconds: float = 0.01) -> None:
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self.before_bytes = self.peak_bytes = self.after_bytes = 0
        self.seconds = 0.0

    def __enter__(self) -> "HostPeak":
        self.before_bytes = self.peak_bytes = host_bytes()
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.seconds = time.perf_counter() - self._started
        self._stop.set()
        self._thread.join()
        self.after_bytes = host_bytes()
        self.peak_bytes = max(self.peak_bytes, self.after_bytes)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self.peak_bytes = max(self.peak_bytes, host_bytes())
