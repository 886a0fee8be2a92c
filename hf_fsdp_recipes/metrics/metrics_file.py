"""metrics.jsonl: one JSON object a line, appended as things happen; survives a kill and a resume."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a metrics.jsonl; a torn line, as a kill leaves it, is passed over."""
    entries = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return [entry for entry in entries if isinstance(entry, dict)]


def append(path: Path, entry: dict[str, Any]) -> None:
    """Write one line at once, so that a kill tears at most this one. Main rank only."""
    with path.open("a") as stream:
        stream.write(json.dumps(entry) + "\n")


def begin(path: Path, step: int, entries: Sequence[dict[str, Any]]) -> None:
    """Begin the file of a run, or go on with it after a resume. Main rank only.

    What the run will measure again is dropped. The file is written beside the old one and replaces it, so that a
    kill costs no line.

    Args:
        path: the file; its directory is made.
        step: the step that the run starts after; 0 begins anew.
        entries: the first lines of this start.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [entry for entry in read_metrics(path) if entry.get("step", 0) <= step] if step else []
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(entry) + "\n" for entry in [*kept, *entries]))
    part.replace(path)


def last_of_each_step(entries: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return the entries that have `key`, by step; of a step that was repeated after a resume, the last one."""
    found = {entry["step"]: entry for entry in entries if key in entry}
    return [found[step] for step in sorted(found)]
