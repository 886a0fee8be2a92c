"""Measures a run's wall time per phase: data, forward and backward, optimizer, save, evaluation, other.

A mark ends a phase. On an accelerator a mark is an event on the current stream, so phases measure device time, including
idle time, no matter when Python launched the work. Marks synchronize with the device only when they are summed: when
the totals are read, or after MAX_MARKS marks.
"""

import contextlib
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MAX_MARKS = 4096  # number of marks kept before they are summed; enough for a few hundred steps
PHASES = ("data", "forward_backward", "optimizer", "save", "evaluation", "other")


class Clock:
    """Measures one rank's time per phase. Calls of `mark` before `start` have no effect."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []  # (phase, end time)
        self._seconds = dict.fromkeys(PHASES, 0.0)  # time per phase, from marks that are already summed
        self._device: ModuleType | None = None
        self._is_running = False

    def start(self, device: ModuleType | None = None) -> None:
        """Start or restart timing. `device` is an accelerator's module, such as `torch.cuda`, or None to use the host's clock."""
        self._device = device if hasattr(device, "Event") else None
        self._is_running = True
        self._marks.clear()
        self.mark("other")
        self.reset()

    def stop(self) -> None:
        """Stop timing. Calls of `mark` after this have no effect."""
        self._is_running = False
        self._marks.clear()

    def mark(self, phase: str) -> None:
        """End `phase` now: the time since the last mark counts as this phase."""
        if not self._is_running:
            return
        now: Any = time.perf_counter()
        if self._device is not None:
            now = self._device.Event(enable_timing=True)
            now.record()
        self._marks.append((phase, now))
        if len(self._marks) > MAX_MARKS:
            self._sum_marks()

    @contextlib.contextmanager
    def spending(self, phase: str, after: str) -> Iterator[None]:
        """Count the time of a `with` block as `phase`, and the time from the last mark to the block as `after`."""
        self.mark(after)
        try:
            yield
        finally:
            self.mark(phase)

    def reset(self) -> None:
        """Discard all times measured so far. The next phase begins at the last mark."""
        del self._marks[:-1]
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def pop(self) -> dict[str, float]:
        """Return the seconds of each phase up to the last mark, and set them to 0. Synchronizes with the device."""
        self._sum_marks()
        seconds = self._seconds
        self.reset()
        return seconds

    def _sum_marks(self) -> None:
        if self._device is not None and self._marks:
            self._marks[-1][1].synchronize()
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            self._seconds[phase] += begin.elapsed_time(end) / 1e3 if self._device is not None else end - begin
        del self._marks[:-1]


clock = Clock()  # MetricsCallback starts it; other modules mark their phases
