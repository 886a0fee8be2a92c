"""The picture that opens the quickstart's report: loss across the kill, and memory while loading."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_fsdp_recipes.metrics import plots


def draw_picture(entries: Sequence[dict], killed: Sequence[dict]) -> Figure:
    """Draw the loss before and after the kill as one curve, next to each rank's memory while the weights load."""
    resumed_at = [entry["from_step"] for entry in entries if "from_step" in entry][-1]
    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    loss, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    steps = [entry for entry in entries if "loss" in entry]
    for part, color, width, label in (
        # A wide line, because the resumed run repeats these steps exactly and covers it.
        ([entry for entry in killed if entry["step"] >= resumed_at], plots.ORANGE, 6, "lost in the kill, repeated"),
        ([entry for entry in steps if entry["step"] <= resumed_at], plots.GRAY, 1.5, "before the kill"),
        ([entry for entry in steps if entry["step"] >= resumed_at], plots.BLUE, 1.5, "resumed"),
    ):
        points = [entry["step"] for entry in part], [entry["loss"] for entry in part]
        loss.plot(*points, ".-", color=color, linewidth=width, label=label)
    loss.axvline(resumed_at, color=plots.GRAY, linestyle=":", label=f"checkpoint of step {resumed_at}")
    plots.style(loss, "Loss across the kill", plots.STEP_LABEL, "nats per token")
    loss.legend(frameon=False)
    draw_loading(memory, entries)
    return figure


def draw_loading(axes: Axes, entries: Sequence[dict]) -> None:
    """Draw the host memory that the last load added on each rank: at its peak, and after the weights were loaded."""
    starts = [entry for entry in entries if "num_parameters" in entry]
    num_ranks, full_mb = starts[-1]["num_ranks"], starts[-1]["num_parameters"] * 4 / 1e6
    stages = [entry for entry in entries if entry.get("stage") == "read into shards"][-num_ranks:]
    for offset, key, color, label in (
        (-0.2, "host_peak_bytes", plots.ORANGE, "peak"),
        (0.2, "host_after_bytes", plots.BLUE, "when loaded"),
    ):
        added = [(stage[key] - stage["host_before_bytes"]) / 1e6 for stage in stages]
        axes.bar([stage["rank"] + offset for stage in stages], added, 0.38, color=color, label=label)
    for size, label in ((full_mb, "the full model"), (full_mb / num_ranks, "one shard")):
        axes.axhline(size, color=plots.GRAY, linestyle="--", linewidth=1)
        place = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(label, (1, size), va="center", fontsize=9, color=plots.GRAY, **place)
    plots.style(axes, "Memory added while loading", "rank", "MB of host memory")
    axes.set_xticks(range(num_ranks))
    axes.set_ylim(0, 1.25 * full_mb)
    axes.legend(frameon=False, loc="upper left", ncols=2)
