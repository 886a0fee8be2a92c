"""Draws the plots of the report (loss, throughput and memory) from entries of metrics.jsonl.

Each function returns a Figure, so that tests can inspect it before it becomes a PNG.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_fsdp_recipes.metrics.clock import PHASES
from hf_fsdp_recipes.metrics.metrics_file import Entry

BLUE, PALE_BLUE, ORANGE, GRAY = "#1f5a8c", "#9db4c8", "#d9822b", "#8a8f98"
PHASE_COLORS = dict(zip(PHASES, ("#d9822b", "#1f5a8c", "#6fa3cf", "#7a4f9a", "#3b8f5c", "#c9ccd1"), strict=True))
RANK_COLORS = ("#1f5a8c", "#d9822b", "#3b8f5c", "#7a4f9a", "#b8434e", "#4fa3b8", "#8c6d31", "#5f6770")
MAX_BARS = 60
MIN_SHARE = 0.01  # of the total time; shorter phases are not drawn, because their bars would be too small to see
STEP_LABEL = "optimizer step"


def draw_loss(entries: Sequence[Entry], evaluations: Sequence[Entry] = ()) -> Figure:
    """Plot the training loss with its moving average, and the evaluation loss."""
    figure, (axes,) = _figure(1)
    _draw_points_and_mean(axes, *_series(entries, lambda entry: entry["loss"]), "training")
    points = [(entry["step"], entry["eval_loss"]) for entry in evaluations if "eval_loss" in entry]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=ORANGE, markersize=4, label="evaluation")
    return _finish(figure, axes, "Loss", "nats per token")


def draw_throughput(entries: Sequence[Entry]) -> Figure:
    """Plot tokens per second and, in a second panel, the time per step by phase."""
    entries = [entry for entry in entries if "step_seconds" in entry]
    figure, (speed, split) = _figure(2)
    counted = [entry for entry in entries if "tokens_per_second" in entry]
    if measured := [entry for entry in counted if not entry.get("is_warmup")]:
        _draw_points_and_mean(speed, *_series(measured, lambda entry: entry["tokens_per_second"]), "as logged")
    if warmup := [entry for entry in counted if entry.get("is_warmup")]:
        points = _series(warmup, lambda entry: entry["tokens_per_second"])
        speed.plot(*points, "x", color=GRAY, markersize=5, label="warm-up (not averaged)")
    _finish(figure, speed, "Throughput", "tokens/s, all ranks, padding excluded")
    _draw_phases(split, _binned([entry for entry in entries if "seconds" in entry]))
    return _finish(figure, split, "Time per step", "seconds per step")


def draw_memory(entries: Sequence[Entry]) -> Figure:
    """Plot the ranks' host memory and, if there are accelerators, the device memory of the rank that uses most."""
    has_device = any(any(entry.get("device_peak_bytes", ())) for entry in entries)
    figure, panels = _figure(2 if has_device else 1)
    if has_device:
        steps, peaks = _series(entries, lambda entry: max(entry["device_peak_bytes"]) / 1e9)
        _, valleys = _series(entries, lambda entry: max(entry["device_valley_bytes"]) / 1e9)
        panels[0].fill_between(steps, valleys, peaks, color=PALE_BLUE, alpha=0.35, linewidth=0)
        panels[0].plot(steps, peaks, color=ORANGE, label="peak within steps")
        panels[0].plot(steps, valleys, color=BLUE, label="between steps (valley)")
        _finish(figure, panels[0], "Device memory, largest rank", "GB allocated")
    _draw_ranks(panels[-1], [entry for entry in entries if entry.get("host_bytes")])
    return _finish(figure, panels[-1], "Host memory", "GB, anonymous pages")


def _draw_points_and_mean(axes: Axes, steps: Sequence[int], values: Sequence[float], name: str) -> None:
    width = len(values) // 10 // 2 * 2 + 1
    if width == 1:
        axes.plot(steps, values, ".-", color=BLUE, label=name)
        return
    axes.plot(steps, values, ".", color=PALE_BLUE, label=name)
    axes.plot(steps, _moving_average(values, width), color=BLUE, linewidth=1.8, label=f"mean of {width}")


def _moving_average(values: Sequence[float], width: int) -> list[float]:
    """Return the centered moving average over `width` values, or over fewer values near the ends."""
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        reach = min(width // 2, i, len(values) - 1 - i)
        means.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return means


def _draw_phases(axes: Axes, bins: Sequence[tuple[float, float, dict[str, float]]]) -> None:
    total = {phase: sum(seconds[phase] for _, _, seconds in bins) for phase in PHASES}
    bottom = [0.0] * len(bins)
    centers, widths = [center for center, _, _ in bins], [width * 0.9 for _, width, _ in bins]
    for phase in PHASES:
        if total[phase] < MIN_SHARE * sum(total.values()):
            continue
        heights = [seconds[phase] for _, _, seconds in bins]
        label = phase.replace("_", " + ")
        axes.bar(centers, heights, widths, bottom=bottom, color=PHASE_COLORS[phase], label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


def _binned(entries: Sequence[Entry]) -> list[tuple[float, float, dict[str, float]]]:
    """Divide entries into at most MAX_BARS groups, one per bar of the plot.

    Returns each group's middle step, number of steps, and seconds per step by phase.
    """
    size = max(1, -(-len(entries) // MAX_BARS))
    bins = []
    for group in (entries[i : i + size] for i in range(0, len(entries), size)):
        num_steps = sum(entry.get("num_steps", 1) for entry in group)
        seconds = {phase: sum(entry["seconds"].get(phase, 0.0) for entry in group) / num_steps for phase in PHASES}
        first, last = group[0]["step"] - group[0].get("num_steps", 1) + 1, group[-1]["step"]
        bins.append(((first + last) / 2, last - first + 1, seconds))
    return bins


def _draw_ranks(axes: Axes, entries: Sequence[Entry]) -> None:
    num_ranks = min((len(entry["host_bytes"]) for entry in entries), default=0)
    if num_ranks <= len(RANK_COLORS):
        for rank in range(num_ranks):
            steps, values = _series(entries, lambda entry, rank=rank: entry["host_bytes"][rank] / 1e9)
            axes.plot(steps, values, ".-", color=RANK_COLORS[rank], markersize=3, label=f"rank {rank}")
        return
    steps, highest = _series(entries, lambda entry: max(entry["host_bytes"]) / 1e9)
    _, lowest = _series(entries, lambda entry: min(entry["host_bytes"]) / 1e9)
    axes.fill_between(steps, lowest, highest, color=PALE_BLUE, alpha=0.35, linewidth=0, label=f"all {num_ranks} ranks")
    axes.plot(steps, highest, color=ORANGE, label="largest rank")
    axes.plot(steps, lowest, color=BLUE, label="smallest rank")


def _series(entries: Sequence[Entry], value: Callable[..., float]) -> tuple[list[int], list[float]]:
    return [entry["step"] for entry in entries], [value(entry) for entry in entries]


def _figure(num_panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8, 0.6 + 3.4 * num_panels), dpi=110, layout="constrained")
    panels = figure.subplots(num_panels, 1, squeeze=False, sharex=True)
    return figure, list(panels[:, 0])


def style(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Set a panel's title, axis labels and common style; the y axis starts at 0."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _finish(figure: Figure, axes: Axes, title: str, unit: str) -> Figure:
    style(axes, title, STEP_LABEL, unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.label_outer()  # the panels share the x axis
    if labels := axes.get_legend_handles_labels()[1]:
        # Place the legend next to the title, so that it covers no data.
        position = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": min(4, len(labels))}
        axes.legend(frameon=False, fontsize=9, borderaxespad=0.2, columnspacing=1.2, **position)
    return figure
