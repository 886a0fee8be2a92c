"""Reads the requests of ranks to the emulated device.

`Ranks.run(..., watch=FOLDER)` in tests/device/ranks.py records them.

    python -m tests.device.emulator.events FOLDER [KIND ...]

prints the events by kind and caller.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Kinds of events: copies from the device, copies to the device, and waits of the host for it.
TO_HOST = ("d2h_async", "d2h_sync", "d2h_nonblocking_pageable")
TO_DEVICE = ("h2d_async", "h2d_sync", "h2d_nonblocking_pageable")
WAITS = (
    "item",
    "event_synchronize",
    "stream_synchronize",
    "device_synchronize",
    "d2h_sync",
    "h2d_sync",
)


@dataclass(frozen=True)
class Event:
    """One request to the device that copies data or makes the host wait.

    Attributes:
        kind: one of TO_HOST, TO_DEVICE or WAITS, `peer_copy`, `h2d_index`, or `op:` and an operator
            whose output size depends on data.
        num_bytes: size of the copy; 0 for other events.
        is_pinned: whether the host memory of a copy is pinned.
        stream: 0 is the default stream; -1 means all of them.
        device: index; -1 if the request names none.
        thread: name of the Python thread.
        caller: the innermost frame, as `module:function:line`.
        project: frames of this project, innermost first, in the same format.
        upstream: frames of libraries other than torch, innermost first, in the same format.
        phase: the phase that the last `torch_npu.watch.mark` named.
        rank: global rank.
    """

    kind: str
    num_bytes: int
    is_pinned: bool
    stream: int
    device: int
    thread: str
    caller: str
    project: tuple[str, ...]
    upstream: tuple[str, ...]
    phase: str
    rank: int

    @property
    def asked_by(self) -> str:
        """The project's two innermost frames, or else the innermost frame of another library."""
        if self.project:
            return " < ".join(self.project[:2])
        return f"upstream: {self.upstream[0]}" if self.upstream else self.caller


def read_events(folder: Path, rank: int | None = None) -> list[Event]:
    """Return the events of one rank or of all, in each rank's order."""
    found: list[Event] = []
    for file in sorted(folder.glob("rank*.jsonl" if rank is None else f"rank{rank}.*.jsonl")):
        phase = ""
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if "phase" in row:
                phase = row["phase"]
                continue
            row |= {name: tuple(row[name]) for name in ("project", "upstream")}
            found.append(Event(**row, phase=phase, rank=int(file.name[4:].split(".")[0])))
    return found


def total_bytes(events: Iterable[Event]) -> int:
    return sum(event.num_bytes for event in events)


def describe(events: list[Event]) -> str:
    """Return a table: number of events and bytes by rank, kind, memory, stream, thread, caller."""
    calls: Counter[tuple[object, ...]] = Counter()
    sizes: Counter[tuple[object, ...]] = Counter()
    for event in events:
        key = (
            f"rank {event.rank}",
            f"device {event.device}",
            event.kind,
            "pinned" if event.is_pinned else "pageable",
            f"stream {event.stream}",
            event.thread,
            event.phase,
            event.asked_by,
        )
        calls[key] += 1
        sizes[key] += event.num_bytes
    return "\n".join(
        f"{count:6} {sizes[key]:12} B  {' | '.join(map(str, key))}"
        for key, count in calls.most_common()
    )


if __name__ == "__main__":
    folder, *kinds = sys.argv[1:]
    events = read_events(Path(folder))
    print(describe([event for event in events if not kinds or event.kind in kinds]))
