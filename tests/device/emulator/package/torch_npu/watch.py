"""Writes the requests of a process to the device, and which code makes them.

Each process has a JSON Lines file, which `tests.device.emulator.events` reads.
"""

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from torch_npu import _C

PROJECT = ("hf_fsdp_recipes.", "__main__")
DEPTH = 40  # the most frames kept per event, for the project and for other libraries

_file: TextIO | None = None
_lock = threading.Lock()


def start(folder: str | Path) -> None:
    """Record everything from now on, in a new file in `folder`.

    Call it in the process that uses the device.
    """
    global _file
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = f"rank{os.environ.get('RANK', '0')}.{os.getpid()}.jsonl"
    _file = Path(folder, name).open("w", buffering=1)  # noqa: SIM115, open until the process ends
    _C.watch(_record)


def mark(phase: str) -> None:
    """Name the phase of all events from now on, in every thread, until the next call."""
    _write({"phase": phase})


def _record(kind: str, num_bytes: int, is_pinned: bool, stream: int, device: int) -> None:
    caller, project, upstream = _callers(sys._getframe(1))
    _write(
        {
            "kind": kind,
            "num_bytes": num_bytes,
            "is_pinned": is_pinned,
            "stream": stream,
            "device": device,
            "thread": threading.current_thread().name,
            "caller": caller,
            "project": project[:DEPTH],
            "upstream": upstream[:DEPTH],
        }
    )


def _write(row: dict[str, Any]) -> None:
    if _file is not None:
        with _lock:
            _file.write(json.dumps(row) + "\n")


def _callers(frame: FrameType | None) -> tuple[str, list[str], list[str]]:
    """Return the innermost frame, this project's frames and other libraries', innermost first."""
    caller, project, upstream = "", [], []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        place = f"{module}:{frame.f_code.co_name}:{frame.f_lineno}"
        if not module.startswith("torch_npu"):
            caller = caller or place
            if module.startswith(PROJECT):
                project.append(place)
            elif not module.startswith(("torch.", "importlib")):
                upstream.append(place)
        frame = frame.f_back
    return caller, project, upstream
