"""Peak memory of a rank, without pages of memory-mapped files."""

import time

from hf_fsdp_recipes.metrics.memory import host_bytes


class PeakMemory:
    """Measures the seconds and the memory of a block.

    A thread samples the anonymous memory of this process every millisecond.
    """

    def __init__(self) -> None:
        import threading

        self._stop = threading.Event()
        self.start_bytes = self.peak_bytes = host_bytes()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self._stop.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, host_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, host_bytes())

    @property
    def growth_bytes(self) -> int:
        """How much the memory grew at most."""
        return self.peak_bytes - self.start_bytes
