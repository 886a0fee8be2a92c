"""Reads and writes metrics.jsonl: one JSON object per line, appended during the run and continued after a resume."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

METRICS_FILE = "metrics.jsonl"
Entry: TypeAlias = dict[str, Any]  # one line
_NEED_STEP = {"loss", "eval_loss", "ended_at_step"}


def read_metrics(path: Path) -> list[Entry]:
    """Return the entries of a metrics.jsonl; skip incomplete lines, and entries that lack a required step."""
    entries = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and type(entry.get("step", None if _NEED_STEP & entry.keys() else 0)) is int:
            entries.append(entry)
    return entries


def append(path: Path, entry: Entry) -> None:
    """Append an entry in a single write, on a new line even if the last line is incomplete. Rank 0 only."""
    with path.open("a+b") as stream:
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, end - 1))
        separator = b"" if stream.read(1) in (b"", b"\n") else b"\n"
        stream.write(separator + json.dumps(entry).encode() + b"\n")


def begin(path: Path, step: int, entries: Sequence[Entry]) -> None:
    """Create the file of a run, or continue it after a resume. Rank 0 only.

    The run continues from `step`, so entries of later steps are dropped; step 0 drops all. The new file replaces the old
    one atomically.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [entry for entry in read_metrics(path) if entry.get("step", 0) <= step] if step else []
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(entry) + "\n" for entry in [*kept, *entries]))
    part.replace(path)


def last_of_each_step(entries: Sequence[Entry], key: str) -> list[Entry]:
    """Return the entries that have `key`, ordered by step; for a step that a resumed run repeated, only the last entry."""
    found = {entry["step"]: entry for entry in entries if key in entry}
    return [found[step] for step in sorted(found)]
