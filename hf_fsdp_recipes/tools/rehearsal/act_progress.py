"""How far a rehearsal is: the act, its steps, the bytes written, the time left. On a terminal; redrawn by a thread."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.metrics import progress

FORMAT = "{desc} {percentage:3.0f}% |{bar}| {postfix}[{elapsed}<{remaining}]"
REDRAW_SECONDS = 0.25
NEARLY = 0.95  # how far an act is shown to be at most, however long it takes


class ActProgress:
    """A bar over acts of which it is known how long they take beside each other.

    Main thread: `begin` and `end`; used as a context. Where no bar is shown, nothing runs and nothing is read.

    Args:
        typical_seconds: by act, in order. Only their shares matter: the pace is that of the acts that are over.
        directory: whose bytes are shown.
        describe: says how far the act is in its own terms, "step 3 of 9".
    """

    def __init__(
        self, title: str, typical_seconds: Mapping[str, float], directory: Path, describe: Callable[[], str]
    ) -> None:
        self._title, self._typical, self._directory, self._describe = title, typical_seconds, directory, describe
        self._bar = progress.bar(sum(typical_seconds.values()), title, bar_format=FORMAT, smoothing=0)
        self._act = ""
        self._began = self._over_typical = self._over_seconds = 0.0
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._redraw, daemon=True)

    def __enter__(self) -> "ActProgress":
        if not self._bar.disable:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_done.set()
        if self._thread.is_alive():
            self._thread.join()
        self._bar.close()

    def begin(self, act: str) -> None:
        """Say which act starts."""
        self._act, self._began = act, time.monotonic()

    def end(self) -> None:
        """Say that the act is over."""
        self._over_seconds += time.monotonic() - self._began
        self._over_typical += self._typical.get(self._act, 0.0)
        self._act = ""

    def reached(self) -> float:
        """Return the typical seconds of what is done, a part of the present act among them."""
        typical = self._typical.get(self._act, 0.0)
        pace = self._over_seconds / self._over_typical if self._over_typical else 1.0
        if not self._act or not typical:
            return self._over_typical
        return self._over_typical + typical * min((time.monotonic() - self._began) / (typical * pace), NEARLY)

    def _redraw(self) -> None:
        while not self._is_done.wait(REDRAW_SECONDS):
            written = progress.format_bytes(_bytes_under(self._directory))
            self._bar.n = self.reached()
            self._bar.set_description_str(f"{self._title}, {self._act}" if self._act else self._title, refresh=False)
            self._bar.set_postfix_str(", ".join(filter(None, (self._describe(), f"{written} written "))))


def _bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:  # a run renames and removes
            continue
    return total
