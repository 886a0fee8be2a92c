"""Draws the plots of a report."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_fsdp_recipes.metrics.metrics_file import PHASES, Entry

Line: TypeAlias = Callable[[Entry], float]  # raises a KeyError for an entry that has no such value


def _gigabytes(key: str, pick: Callable[[list[int]], int] = max) -> Line:
    return lambda entry: pick(entry[key]) / 1e9


def _seconds_per_step(phase: str) -> Line:
    return lambda entry: entry["seconds"][phase] / entry["num_steps"]


LOSS: dict[str, Line] = {"training": lambda entry: entry["loss"], "evaluation": lambda entry: entry["eval_loss"]}
THROUGHPUT: dict[str, Line] = {"all ranks": lambda entry: entry["tokens_per_second"]}
PHASE_SECONDS = {phase: _seconds_per_step(phase) for phase in PHASES}
DEVICE = {"peak": _gigabytes("device_peak_bytes"), "between steps (valley)": _gigabytes("device_valley_bytes")}
HOST = {"largest rank": _gigabytes("host_bytes"), "smallest rank": _gigabytes("host_bytes", min)}
PLOTS = {  # for each file the title, unit and lines of each panel
    "loss.png": [("Loss", "nats per token", LOSS)],
    "throughput.png": [
        ("Throughput, padding excluded", "tokens/s", THROUGHPUT),
        ("Time per step", "seconds", PHASE_SECONDS),
    ],
    "memory.png": [("Device memory, largest rank", "GB", DEVICE), ("Host memory", "GB", HOST)],
}


def write_plots(directory: Path, entries: Sequence[Entry]) -> list[str]:
    """Write loss.png, throughput.png and memory.png, and return their names."""
    for name, panels in PLOTS.items():
        figure = Figure(figsize=(8, 3.5 * len(panels)), layout="constrained")
        for axes, (title, unit, lines) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            for label, value in lines.items():
                points = {}
                for entry in entries:
                    with contextlib.suppress(KeyError):
                        points[entry["step"]] = value(entry)
                axes.plot(list(points), list(points.values()), ".-", label=label)
            style(axes, title, "optimizer step", unit)
            axes.legend()
        figure.savefig(directory / name)
    return list(PLOTS)


def style(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Set a panel's title, labels and grid; the y axis starts at 0."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
