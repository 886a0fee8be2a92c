"""Reads and writes metrics.jsonl. Each line is an entry, stored as a JSON object."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

METRICS_FILE = "metrics.jsonl"
PHASES = ("data", "forward_backward", "optimizer", "save", "evaluation", "other")
NOT_TRAINING = ("save", "evaluation")  # phases that throughput excludes

Entry: TypeAlias = dict[str, Any]


def read_metrics(path: Path) -> list[Entry]:
    """Return the entries of a metrics.jsonl, or [] if there is no file. Skip a line that a killed run left incomplete."""
    entries = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            entries.append(dict(json.loads(line)))
        except (TypeError, ValueError):
            continue
    return entries


def begin(path: Path, step: int, entry: Entry) -> None:
    """Add the entry for the start of a run. Of the earlier entries, keep those up to `step`. If `step` is 0, keep none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [old for old in read_metrics(path) if old.get("step", 0) <= step] if step else []
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(one) + "\n" for one in [*kept, entry]))
    part.replace(path)


def append(path: Path, entry: Entry) -> None:
    """Append an entry."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def average(steps: Sequence[Entry], rate: str) -> float | None:
    """Return the time-weighted mean of a rate over the steps after the warm-up, or None if there are no such steps."""
    measured = [step for step in steps if rate in step and not step.get("is_warmup")]
    weights = [step["step_seconds"] * step["num_steps"] for step in measured]
    return (
        sum(s[rate] * w for s, w in zip(measured, weights, strict=True)) / sum(weights)
        if weights
        else None
    )
