"""Divides a run's wall time into parts: data, forward and backward, optimizer, save, evaluation, the rest.

A mark ends the part that went before it. On an accelerator a mark is an event in its queue of work, so that a part
is the time in which the device did it (or stood still for it), not the time in which Python asked for it; nothing
waits until the sums are taken.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

MAX_MARKS = 4096  # kept until they are added up: some hundred steps
PARTS = ("data", "forward_backward", "optimizer", "save", "evaluation", "other")


class Clock:
    """Marks of one rank. Does nothing until it is started. No collectives."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []  # the part that ends here, and when
        self._seconds = dict.fromkeys(PARTS, 0.0)  # of marks that have been added up
        self._device: Any = None
        self._is_running = False

    def start(self, device: Any = None) -> None:
        """Start, or start anew.

        Args:
            device: the accelerator's module (`torch.cuda`), or None for the host's clock.
        """
        self._device = device if hasattr(device, "Event") else None
        self._is_running = True
        self._marks.clear()
        self.mark("other")
        self.drop()

    def stop(self) -> None:
        """Stop; marks are ignored from here on."""
        self._is_running = False
        self._marks.clear()

    def mark(self, part: str) -> None:
        """End a part now."""
        if not self._is_running:
            return
        self._marks.append((part, self._now()))
        if len(self._marks) > MAX_MARKS:
            self._add_up()

    @contextlib.contextmanager
    def spending(self, part: str, after: str) -> Iterator[None]:
        """Count a block as one part, and what went before it as another."""
        self.mark(after)
        try:
            yield
        finally:
            self.mark(part)

    def drop(self) -> None:
        """Forget all but the last mark."""
        del self._marks[:-1]
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last `take`, `drop` or `start`; on a device, wait for the last mark."""
        self._add_up()
        seconds = self._seconds
        self.drop()
        return seconds

    def _add_up(self) -> None:
        if self._device is not None and self._marks:
            self._marks[-1][1].synchronize()
        for (_, begin), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            self._seconds[part] += begin.elapsed_time(end) / 1e3 if self._device is not None else end - begin
        del self._marks[:-1]

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = self._device.Event(enable_timing=True)
        event.record()
        return event


clock = Clock()  # of this process: MetricsCallback runs it, and rooms above mark what they spend
