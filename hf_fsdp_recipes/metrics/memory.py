"""Measures the host and device memory of this process, in bytes.

Host memory means anonymous memory (RssAnon + RssShmem). Pages of memory-mapped files do not count: they belong to the page
cache.
"""

import threading
import time
from pathlib import Path
from types import ModuleType

import torch

SAMPLE_INTERVAL_SECONDS = 0.01


def host_bytes(process: int | str = "self") -> int:
    """Return the anonymous resident memory of a process in bytes."""
    total = 0
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total


def device_bytes() -> tuple[int, int]:
    """Return the bytes allocated on this rank's accelerator, now and at the peak; zeros without an accelerator."""
    if not torch.accelerator.is_available():
        return 0, 0
    return torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()


class DeviceMemory:
    """Measures the memory allocated on this rank's accelerator between two logged steps. On CPU ranks all values are 0.

    Args:
        device: the accelerator's module (`torch.cuda`), or None. A module without memory counters (`torch.mps`) is treated as None.
    """

    def __init__(self, device: ModuleType | None = None) -> None:
        self._device = device if hasattr(device, "reset_peak_memory_stats") else None
        self._valley_bytes: int | None = None

    def sample_valley(self) -> None:
        """Record the allocated memory. Call this between steps, after activations and gradients are freed."""
        if self._device is not None:
            now = self._device.memory_allocated()
            self._valley_bytes = now if self._valley_bytes is None else min(now, self._valley_bytes)

    def pop(self) -> tuple[int, int, int, int]:
        """Return (allocated now, lowest sample, peak, peak reserved) in bytes; the last three since the previous `pop`."""
        if self._device is None:
            return 0, 0, 0, 0
        now, peak = self._device.memory_allocated(), self._device.max_memory_allocated()
        reserved = self._device.max_memory_reserved() if hasattr(self._device, "max_memory_reserved") else 0
        valley = now if self._valley_bytes is None else self._valley_bytes
        self._device.reset_peak_memory_stats()
        self._valley_bytes = None
        return now, valley, peak, reserved


class HostPeak:
    """Measures a block's duration and, by sampling in a thread, this process's peak anonymous memory."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.before_bytes = self.peak_bytes = self.after_bytes = 0
        self.seconds = 0.0

    def __enter__(self) -> "HostPeak":
        self.before_bytes = self.peak_bytes = host_bytes()
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self._stop.set()
        self._thread.join()
        self.after_bytes = host_bytes()
        self.peak_bytes = max(self.peak_bytes, self.after_bytes)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_SECONDS):
            self.peak_bytes = max(self.peak_bytes, host_bytes())
