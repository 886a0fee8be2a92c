"""Reads and writes metrics.jsonl. Each line is an entry, stored as a JSON object."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

METRICS_FILE = "metrics.jsonl"
PHASES = (
    "data",
    "forward_backward",
    "optimizer",
    "save",
    "evaluation",
    "other",
)
NOT_TRAINING = ("save", "evaluation")  # phases that throughput excludes

Entry = dict[str, Any]
Entries = Sequence[Entry]


def read_metrics(path: Path) -> list[Entry]:
    """Return the entries of a metrics.jsonl, or [] if there is no file.

    A line that a killed run left incomplete is skipped.
    """
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(TypeError, ValueError):
            entries.append(dict(json.loads(line)))
    return entries


def begin(path: Path, start: Entry) -> None:
    """Add the entry for the start of a run.

    Of the earlier entries, keep those up to the step that the run starts from. Keep none if this
    is step 0.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = []
    from_step = start["from_step"]
    if from_step:
        entries = [entry for entry in read_metrics(path) if entry.get("step", 0) <= from_step]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(entry) + "\n" for entry in [*entries, start]))
    part.replace(path)


def append(path: Path, entry: Entry) -> None:
    """Append an entry."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def average(steps: Entries, rate: str) -> float | None:
    """Return the mean of a rate over the steps after the warm-up, weighted by their time.

    Return None if there are no such steps.
    """
    measured = [step for step in steps if rate in step and not step.get("is_warmup")]
    if not measured:
        return None
    seconds = [step["step_seconds"] * step["num_steps"] for step in measured]
    return fmean([step[rate] for step in measured], weights=seconds)
