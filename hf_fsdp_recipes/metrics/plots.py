"""Draws the picture of a report."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_fsdp_recipes.metrics.metrics_file import PHASES, Entry

Line: TypeAlias = Callable[[Entry], float]  # raises a KeyError for an entry that has no such value


def _gigabytes(key: str) -> Line:
    return lambda entry: max(entry[key]) / 1e9


def _seconds_per_step(phase: str) -> Line:
    return lambda entry: entry["seconds"][phase] / entry["num_steps"]


PANELS: list[tuple[str, str, dict[str, Line]]] = [  # title, unit and lines
    (
        "Loss",
        "nats per token",
        {"training loss": lambda entry: entry["loss"], "evaluation loss": lambda entry: entry["eval_loss"]},
    ),
    ("Throughput, padding excluded", "tokens/s", {"all ranks": lambda entry: entry["tokens_per_second"]}),
    ("Time per step", "seconds", {phase: _seconds_per_step(phase) for phase in PHASES}),
    ("Host memory at optimizer steps, largest rank", "GB", {"anonymous pages": _gigabytes("host_bytes")}),
    (
        "Device memory, largest rank",
        "GB",
        {"peak": _gigabytes("device_peak_bytes"), "between steps (valley)": _gigabytes("device_valley_bytes")},
    ),
]


def draw(entries: Sequence[Entry]) -> Figure:
    """Draw loss, throughput, phases of a step and memory by step."""
    figure = Figure(figsize=(8, 3 * len(PANELS)), layout="constrained")
    for axes, (title, unit, lines) in zip(figure.subplots(len(PANELS)), PANELS, strict=True):
        for label, value in lines.items():
            points = {}
            for entry in entries:
                with contextlib.suppress(KeyError):
                    points[entry["step"]] = value(entry)
            axes.plot(list(points), list(points.values()), ".-", label=label)
        style(axes, title, "optimizer step", unit)
        axes.legend()
    return figure


def style(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Set a panel's title, labels and grid; the y axis starts at 0."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
