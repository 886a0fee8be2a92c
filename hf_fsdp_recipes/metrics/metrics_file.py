"""Reads and writes metrics.jsonl. Each line is an entry, stored as a JSON object."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
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
RATES = ("tokens_per_second", "tokens_per_second_per_device", "mfu")
MEMORY = (
    "host_bytes",
    "device_valley_bytes",
    "device_peak_bytes",
    "device_reserved_peak_bytes",
)
TRAINING = ("data", "forward_backward", "optimizer", "other")  # phases that throughput includes

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
    from_step = start["from_step"]
    earlier = read_metrics(path) if from_step else []
    entries = [entry for entry in earlier if entry.get("step", 0) <= from_step]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(entry) + "\n" for entry in [*entries, start]))
    part.replace(path)


def append(path: Path, entry: Entry) -> None:
    """Append an entry."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def flatten(step: Entry) -> Entry:
    """Return a logged step with each phase's seconds per step, and the largest rank's GB."""
    phases = {phase: spent / step["num_steps"] for phase, spent in step["seconds"].items()}
    flat = step | phases | {name: max(step[name]) / 1e9 for name in MEMORY}
    flat["peak"] = flat["device_peak_bytes"] or flat["host_bytes"]
    return flat


def summarize(steps: Entries) -> dict[str, float]:
    """Return what the logged steps of a run have measured. What is 0 or missing is left out.

    Memory is the largest of any rank and step, in GB. The warm-up counts only for memory: time is
    the median, and a rate is the mean, weighted by time.
    """
    summary = {}
    for name in MEMORY:
        largest = max((max(step[name]) for step in steps), default=0)
        if largest:
            summary[name] = largest / 1e9
    warm = [step for step in steps if not step.get("is_warmup")]
    if warm:
        summary["step_seconds"] = median(step["step_seconds"] for step in warm)
    for name in RATES:
        measured = [step for step in warm if name in step]
        if measured:
            seconds = [step["step_seconds"] * step["num_steps"] for step in measured]
            summary[name] = fmean([step[name] for step in measured], weights=seconds)
    return summary
