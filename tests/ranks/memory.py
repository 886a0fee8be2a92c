"""Peak memory of a rank, without pages of memory-mapped files."""

from pathlib import Path


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class PeakMemory:
    """Samples the anonymous memory of this process in a thread, every millisecond."""

    def __init__(self) -> None:
        import threading

        self._stop = threading.Event()
        self.start_bytes = self.peak_bytes = _anonymous_bytes()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, _anonymous_bytes())

    @property
    def growth_bytes(self) -> int:
        """How much the memory grew at most."""
        return self.peak_bytes - self.start_bytes
