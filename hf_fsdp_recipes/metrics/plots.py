"""The report's figures: loss, throughput, memory. Draws entries of metrics.jsonl; reads and writes no file of its own.

Each function returns a Figure, so that what is in it can be looked at before it becomes a PNG.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_fsdp_recipes.metrics.clock import PARTS

BLUE, PALE_BLUE, ORANGE, GREY = "#1f5a8c", "#9db4c8", "#d9822b", "#8a8f98"
PART_COLOURS = dict(zip(PARTS, ("#d9822b", "#1f5a8c", "#6fa3cf", "#7a4f9a", "#3b8f5c", "#c9ccd1"), strict=True))
PART_NAMES = dict(zip(PARTS, ("data", "forward, backward", "optimizer", "save", "evaluation", "other"), strict=True))
RANK_COLOURS = ("#1f5a8c", "#d9822b", "#3b8f5c", "#7a4f9a", "#b8434e", "#4fa3b8", "#8c6d31", "#5f6770")
MAX_BARS = 60
MIN_SHARE = 0.01  # of the time: parts below it would be a name without a bar
STEP_LABEL = "optimizer step"


def draw_loss(entries: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]] = ()) -> Figure:
    """Draw the loss over the steps with its running mean, and the evaluations."""
    figure, (axes,) = _figure(1)
    steps, losses = _series(entries, lambda entry: entry["loss"])
    _draw_points_and_mean(axes, steps, losses, "training loss")
    points = [(entry["step"], entry["eval_loss"]) for entry in evaluations if "eval_loss" in entry]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=ORANGE, markersize=4, label="evaluation loss")
    return _finished(figure, axes, "Loss", "loss, nats a token")


def draw_throughput(entries: Sequence[dict[str, Any]]) -> Figure:
    """Draw tokens a second, where they were counted, over the seconds of a step by what they went to."""
    entries = [entry for entry in entries if "step_seconds" in entry]
    figure, (speed, split) = _figure(2)
    warm = [entry for entry in entries if not entry.get("is_warmup")]
    cold = [entry for entry in entries if entry.get("is_warmup")]
    if any("tokens_per_second" in entry for entry in warm):
        _draw_points_and_mean(speed, *_series(warm, lambda entry: entry.get("tokens_per_second")), "tokens a second")
    if any("tokens_per_second" in entry for entry in cold):
        points = _series(cold, lambda entry: entry.get("tokens_per_second"))
        speed.plot(*points, "x", color=GREY, markersize=5, label="warm-up, not averaged")
    _finished(figure, speed, "Throughput, padding not counted", "tokens a second, all ranks")
    _draw_split(split, _binned([entry for entry in entries if "seconds" in entry]))
    return _finished(figure, split, "Where the time of a step goes", "seconds a step")


def draw_memory(entries: Sequence[dict[str, Any]]) -> Figure:
    """Draw host memory rank by rank, below the device's valley and peak where there is a device."""
    has_device = any(any(entry.get("device_peak_bytes", ())) for entry in entries)
    figure, panels = _figure(2 if has_device else 1)
    if has_device:
        steps, peaks = _series(entries, lambda entry: max(entry["device_peak_bytes"]) / 1e9)
        _, valleys = _series(entries, lambda entry: max(entry["device_valley_bytes"]) / 1e9)
        panels[0].fill_between(steps, valleys, peaks, color=PALE_BLUE, alpha=0.35, linewidth=0)
        panels[0].plot(steps, peaks, color=ORANGE, label="peak within the steps")
        panels[0].plot(steps, valleys, color=BLUE, label="valley between the steps")
        _finished(figure, panels[0], "Device memory of the largest rank", "allocated, GB")
    _draw_ranks(panels[-1], [entry for entry in entries if entry.get("host_bytes")])
    return _finished(figure, panels[-1], "Host memory", "anonymous memory, GB")


def _draw_points_and_mean(axes: Axes, steps: Sequence[int], values: Sequence[float], name: str) -> None:
    width = len(values) // 10 // 2 * 2 + 1
    if width == 1:
        axes.plot(steps, values, ".-", color=BLUE, label=name)
        return
    axes.plot(steps, values, ".", color=PALE_BLUE, label=f"{name}, as logged")
    axes.plot(steps, _running_mean(values, width), color=BLUE, linewidth=1.8, label=f"mean of {width}")


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return means of `width` neighbours, centred so that they do not lag; of fewer towards the ends."""
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        reach = min(width // 2, i, len(values) - 1 - i)
        means.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return means


def _draw_split(axes: Axes, bins: Sequence[tuple[float, float, dict[str, float]]]) -> None:
    total = {part: sum(seconds[part] for _, _, seconds in bins) for part in PARTS}
    bottom = [0.0] * len(bins)
    for part in PARTS:
        if total[part] < MIN_SHARE * sum(total.values()):
            continue
        heights = [seconds[part] for _, _, seconds in bins]
        centres, widths = [centre for centre, _, _ in bins], [width * 0.9 for _, width, _ in bins]
        axes.bar(centres, heights, widths, bottom=bottom, color=PART_COLOURS[part], label=PART_NAMES[part])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


def _binned(entries: Sequence[dict[str, Any]]) -> list[tuple[float, float, dict[str, float]]]:
    """Return (middle step, number of steps, seconds a step by part) for at most MAX_BARS groups of entries."""
    size = max(1, -(-len(entries) // MAX_BARS))
    bins = []
    for group in (entries[i : i + size] for i in range(0, len(entries), size)):
        num_steps = sum(entry.get("num_steps", 1) for entry in group)
        seconds = {part: sum(entry["seconds"].get(part, 0.0) for entry in group) / num_steps for part in PARTS}
        first = group[0]["step"] - group[0].get("num_steps", 1) + 1
        bins.append(((first + group[-1]["step"]) / 2, group[-1]["step"] - first + 1, seconds))
    return bins


def _draw_ranks(axes: Axes, entries: Sequence[dict[str, Any]]) -> None:
    num_ranks = min((len(entry["host_bytes"]) for entry in entries), default=0)
    if num_ranks <= len(RANK_COLOURS):
        for rank in range(num_ranks):
            steps, values = _series(entries, lambda entry, rank=rank: entry["host_bytes"][rank] / 1e9)
            axes.plot(steps, values, ".-", color=RANK_COLOURS[rank], markersize=3, label=f"rank {rank}")
        return
    steps, highest = _series(entries, lambda entry: max(entry["host_bytes"]) / 1e9)
    _, lowest = _series(entries, lambda entry: min(entry["host_bytes"]) / 1e9)
    axes.fill_between(steps, lowest, highest, color=PALE_BLUE, alpha=0.35, linewidth=0, label=f"all {num_ranks} ranks")
    axes.plot(steps, highest, color=ORANGE, label="largest rank")
    axes.plot(steps, lowest, color=BLUE, label="smallest rank")


def _series(entries: Sequence[dict[str, Any]], value: Callable[..., float | None]) -> tuple[list[int], list[float]]:
    points = [(entry["step"], found) for entry in entries if (found := value(entry)) is not None]
    return [step for step, _ in points], [found for _, found in points]


def _figure(num_panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8, 1.2 + 3.2 * num_panels), dpi=110, layout="constrained")
    panels = figure.subplots(num_panels, 1, squeeze=False)
    return figure, list(panels[:, 0])


def style(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Give a panel its title, its units and the look of all panels; values start at zero."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _finished(figure: Figure, axes: Axes, title: str, unit: str) -> Figure:
    style(axes, title, STEP_LABEL, unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
