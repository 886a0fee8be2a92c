"""A sweep's figures: memory, epoch time and step time against ranks, and the strategies against each other.

Draws results; reads no file. Each function returns a Figure, so that what is in it can be looked at.
Source: figure 1 of AMD's article on FSDP with ROCm; the advice to compare strategies by MFU is that of Prime
Intellect's multi-node FSDP tutorial.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator

from hf_fsdp_recipes.metrics.plots import RANK_COLORS, style
from hf_fsdp_recipes.tools.sweep.cases import FINISHED, OUT_OF_MEMORY
from hf_fsdp_recipes.tools.sweep.results import DEVICE_RESERVED, Result

MARKERS = "osD^vPX*"
OOM_STACK = 0.07  # of a panel's height, between the marks of two templates


def draw_scaling(results: Sequence[Result]) -> Figure:
    """Draw peak memory, epoch time and step time against the number of ranks, a line a template, OOM marked."""
    figure = Figure(figsize=(14, 5.0), dpi=110, layout=ConstrainedLayoutEngine(wspace=0.06))
    panels = figure.subplots(1, 3)
    size, unit = _time_unit([result["epoch_seconds"] for result in results if "epoch_seconds" in result])
    memory = f"{_memory_name(results)} of the largest rank, GB"
    _draw_panel(panels[0], results, "peak_memory_bytes", 1e9, "Peak memory", memory)
    _draw_panel(panels[1], results, "epoch_seconds", size, "Epoch time, extrapolated", f"{unit} an epoch")
    _draw_panel(panels[2], results, "step_seconds", 1, "Step time", "seconds a step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)
    return figure


def draw_strategies(results: Sequence[Result]) -> Figure:
    """Draw MFU, or tokens a second where it is not known, against memory: a point a template, at most ranks."""
    num_ranks = max((result["num_ranks"] for result in results if _rate(result)), default=0)
    here = [result for result in results if result["num_ranks"] == num_ranks]
    finished = [result for result in here if _rate(result)]
    rate = "mfu" if finished and all("mfu" in result for result in finished) else "tokens_per_second"
    figure = Figure(figsize=(8, 5.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, colour, marker in _looks(results):
        for result in (one for one in here if one["template"] == name):
            if result in finished:
                value = result[rate] * (100 if rate == "mfu" else 1)
                memory = result["peak_memory_bytes"] / 1e9
                axes.plot([memory], [value], marker, color=colour, markersize=9, label=name)
            else:
                axes.plot([], [], "x", color=colour, markersize=8, label=f"{name}: {result['outcome'].split(':')[0]}")
    label = "MFU, % of the dense peak" if rate == "mfu" else "tokens a second, all ranks"
    title = f"Strategies at {num_ranks} rank{'s'[: num_ranks != 1]}: up is faster, left is less memory"
    style(axes, title, f"peak {_memory_name(results)} of the largest rank, GB", label)
    axes.set_xlim(0, 1.12 * max((result["peak_memory_bytes"] / 1e9 for result in finished), default=1.0))
    axes.set_ylim(0, 1.12 * axes.dataLim.y1 if finished else 1.0)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _rate(result: Result) -> bool:
    return "peak_memory_bytes" in result and "tokens_per_second" in result


def _looks(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Return name, colour and marker of each template: the same in every figure."""
    names = dict.fromkeys(result["template"] for result in results)
    return [(name, RANK_COLORS[i % len(RANK_COLORS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)]


def _draw_panel(axes: Axes, results: Sequence[Result], key: str, size: float, title: str, unit: str) -> None:
    ranks = sorted({result["num_ranks"] for result in results})
    out: dict[int, int] = {}
    for name, colour, marker in _looks(results):
        mine = [result for result in results if result["template"] == name]
        points = [(result["num_ranks"], result[key] / size) for result in mine if key in result]
        axes.plot(*(zip(*points, strict=True) if points else ([], [])), f"{marker}-", color=colour, label=name)
        for result in mine:
            if result["outcome"] == OUT_OF_MEMORY:
                _mark_out_of_memory(axes, result["num_ranks"], out.setdefault(result["num_ranks"], 0), colour)
                out[result["num_ranks"]] += 1
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(count) for count in ranks])
    axes.set_xlim(ranks[0] / 1.3, ranks[-1] * 1.3)
    style(axes, title, "ranks", unit)
    highest = max((result[key] / size for result in results if key in result), default=1.0)
    axes.set_ylim(0, 1.08 * highest / (1 - OOM_STACK * max(out.values(), default=0)))  # the marks stand above all lines


def _mark_out_of_memory(axes: Axes, num_ranks: int, place: int, colour: str) -> None:
    """Write OOM over the number of ranks, one below the other where several templates ran out of memory."""
    height = 1 - (place + 0.8) * OOM_STACK
    axes.text(
        num_ranks, height, "OOM", color=colour, fontweight="bold", ha="center", transform=axes.get_xaxis_transform()
    )


def _memory_name(results: Sequence[Result]) -> str:
    kinds: set[Any] = {
        result["memory_kind"] for result in results if result["outcome"] == FINISHED and "memory_kind" in result
    }
    return "reserved device memory" if DEVICE_RESERVED in kinds else "anonymous host memory"


def _time_unit(seconds: Sequence[float]) -> tuple[float, str]:
    longest = max(seconds, default=0.0)
    return next(
        ((size, unit) for size, unit in ((3600, "hours"), (60, "minutes")) if longest >= 2 * size), (1, "seconds")
    )
