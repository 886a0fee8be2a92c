"""Plots of a sweep: scaling as in figure 1 of AMD's article on FSDP with ROCm, and strategies compared by MFU."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator

from hf_fsdp_recipes.metrics.plots import RANK_COLORS, style
from hf_fsdp_recipes.tools.sweep.results import DEVICE, Result
from hf_fsdp_recipes.tools.sweep.run_status import OUT_OF_MEMORY
from hf_fsdp_recipes.units import count

MARKERS = "osD^vPX*"
OOM_LABEL_HEIGHT = 0.07  # distance between OOM labels, as a share of the panel's height


def draw_scaling(results: Sequence[Result]) -> Figure:
    """Draw peak memory, epoch time and step time by rank count: one line per template; "OOM" marks cases that ran out of memory."""
    figure = Figure(figsize=(14, 5.0), dpi=110, layout=ConstrainedLayoutEngine(wspace=0.06))
    panels = figure.subplots(1, 3)
    longest = max((result.epoch_seconds or 0.0 for result in results), default=0.0)
    size, unit = (3600, "hours") if longest >= 7200 else (60, "minutes") if longest >= 120 else (1, "seconds")
    _draw_panel(panels[0], results, "peak_memory_bytes", 1e9, "Peak memory", _memory_label(results))
    _draw_panel(panels[1], results, "epoch_seconds", size, "Epoch time, extrapolated", f"{unit} per epoch")
    _draw_panel(panels[2], results, "step_seconds", 1, "Step time", "seconds per step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)
    return figure


def draw_strategies(results: Sequence[Result]) -> Figure:
    """Draw MFU, or tokens/s if MFU is unknown, against memory at the largest rank count, with one point per template."""
    points = [result for result in results if result.peak_memory_bytes and result.tokens_per_second]
    num_ranks = max((result.num_ranks for result in points), default=0)
    points = [result for result in points if result.num_ranks == num_ranks]
    has_mfu = all(result.mfu is not None for result in points)
    figure = Figure(figsize=(8, 5.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, color, marker in _line_styles(results):
        for result in results:
            if (result.template, result.num_ranks) != (name, num_ranks):
                continue
            if result in points:
                value = 100 * (result.mfu or 0.0) if has_mfu else result.tokens_per_second
                memory = (result.peak_memory_bytes or 0) / 1e9
                axes.plot([memory], [value], marker, color=color, markersize=9, label=name)
            else:
                axes.plot([], [], "x", color=color, markersize=8, label=f"{name}: {result.status.split(':')[0]}")
    title = f"Strategies at {count(num_ranks, 'rank')} (up: faster, left: less memory)"
    style(axes, title, f"peak {_memory_label(results)}", "MFU, % of dense peak" if has_mfu else "tokens/s, all ranks")
    axes.set_xlim(0, 1.12 * max((result.peak_memory_bytes or 0 for result in points), default=1e9) / 1e9)
    axes.set_ylim(0, 1.12 * axes.dataLim.y1 if points else 1.0)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _line_styles(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Return name, color and marker of each template, the same in both plots."""
    names = dict.fromkeys(result.template for result in results)
    return [(name, RANK_COLORS[i % len(RANK_COLORS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)]


def _draw_panel(axes: Axes, results: Sequence[Result], field: str, size: float, title: str, label: str) -> None:
    """Draw a field of the results, divided by `size`, against the rank count."""
    ranks = sorted({result.num_ranks for result in results})
    values = {result: getattr(result, field) / size for result in results if getattr(result, field) is not None}
    num_oom_labels = dict.fromkeys(ranks, 0)
    for name, color, marker in _line_styles(results):
        points = [(result.num_ranks, value) for result, value in values.items() if result.template == name]
        axes.plot(*(zip(*points, strict=True) if points else ([], [])), f"{marker}-", color=color, label=name)
        for result in results:
            if result.template == name and result.status == OUT_OF_MEMORY:
                height = 1 - (num_oom_labels[result.num_ranks] + 0.8) * OOM_LABEL_HEIGHT
                num_oom_labels[result.num_ranks] += 1
                position = axes.get_xaxis_transform()
                axes.text(
                    result.num_ranks, height, "OOM", color=color, fontweight="bold", ha="center", transform=position
                )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(count) for count in ranks])
    axes.set_xlim(ranks[0] / 1.3, ranks[-1] * 1.3)
    style(axes, title, "ranks", label)
    height_for_lines = 1 - OOM_LABEL_HEIGHT * max(num_oom_labels.values())  # the OOM labels are above all lines
    axes.set_ylim(0, 1.08 * max(values.values(), default=1.0) / height_for_lines)


def _memory_label(results: Sequence[Result]) -> str:
    is_on_device = any(result.memory_kind == DEVICE for result in results)
    return f"{'reserved device' if is_on_device else 'anonymous host'} memory of the largest rank, GB"
