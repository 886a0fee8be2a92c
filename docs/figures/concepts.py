"""Draw docs/figures/concepts.png: what each GPU stores, and a GPU's memory over a FULL_SHARD step.

    python docs/figures/concepts.py

The shapes are schematic; nothing in the picture is measured.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

PARAMETERS, GRADIENTS, OPTIMIZER = "#4C78A8", "#E0912F", "#59A14F"
GATHERED, ACTIVATIONS = "#9CC3E6", "#CFC6D9"
INK, MUTED, EMPTY = "#222222", "#6B6B6B", "#F1F1F1"
NUM_GPUS, NUM_UNITS = 4, 4

ROWS = (("parameters", PARAMETERS), ("gradients", GRADIENTS), ("optimizer", OPTIMIZER))
# For each strategy: into how many shards each row is split (1 = every GPU stores all of it).
STRATEGIES = (
    ("NO_SHARD", "full copies, like DDP", (1, 1, 1)),
    ("SHARD_GRAD_OP", "full parameters during the step", (1, 4, 4)),
    ("FULL_SHARD", "everything sharded over all GPUs", (4, 4, 4)),
    ("HYBRID_SHARD", "sharded in a node, one replica each", (2, 2, 2)),
)

# One step, in arbitrary time units: each span is (first, last).
COMPUTE, NETWORK = "compute", "network"
FORWARD = [(1 + unit, 2 + unit) for unit in range(NUM_UNITS)]
BACKWARD = [(11 - 2 * unit, 13 - 2 * unit) for unit in range(NUM_UNITS)]  # unit 4 first
OPTIMIZER_STEP, END = (14, 15.2), 16.2
GATHER_FORWARD = [(unit, unit + 1) for unit in range(NUM_UNITS)]
GATHER_BACKWARD = [(first - 1, first) for first, _ in BACKWARD[:-1]]  # unit 4 is still gathered
REDUCE = [(last, last + 1) for _, last in BACKWARD]


def draw_storage(axes: Axes, name: str, subtitle: str, num_shards: tuple[int, int, int]) -> None:
    """Draw four GPUs in two nodes, each with the pieces that it stores."""
    axes.set_xlim(0, 10.6)
    axes.set_ylim(-1.5, 4.7)
    axes.axis("off")
    axes.text(5.3, 4.35, name, ha="center", fontsize=11.5, fontweight="bold", color=INK)
    axes.text(5.3, 3.72, subtitle, ha="center", fontsize=8.4, color=MUTED)
    for node in range(2):
        left = 0.05 + node * 5.4
        axes.add_patch(
            FancyBboxPatch(
                (left, -0.55),
                5.0,
                3.75,
                boxstyle="round,pad=0,rounding_size=0.25",
                fc="none",
                ec="#C4C4C4",
            )
        )
        axes.text(left + 2.5, -1.2, f"node {node}", ha="center", fontsize=8.4, color=MUTED)
    for gpu in range(NUM_GPUS):
        left = 0.3 + gpu * 2.35 + (gpu // 2) * 0.7
        axes.text(left + 1.0, -0.38, f"GPU {gpu}", ha="center", fontsize=8, color=INK)
        for row, ((_, color), shards) in enumerate(zip(ROWS, num_shards, strict=True)):
            for piece in range(NUM_GPUS):
                is_held = piece * shards // NUM_GPUS == gpu % shards
                axes.add_patch(
                    Rectangle(
                        (left + piece * 0.5, 2.25 - row * 0.98),
                        0.5,
                        0.78,
                        fc=color if is_held else EMPTY,
                        ec="white",
                        lw=1.2,
                    )
                )


def draw_schedule(axes: Axes) -> None:
    """Draw which unit is computed and which one is on the network, over one step."""
    axes.set_xlim(-0.3, END)
    axes.set_ylim(-0.15, 2.35)
    axes.axis("off")

    def block(row: str, span: tuple[float, float], label: str, color: str) -> None:
        bottom = 1.2 if row == COMPUTE else 0.1
        axes.add_patch(
            Rectangle((span[0], bottom), span[1] - span[0], 0.9, fc=color, ec="white", lw=1.5)
        )
        axes.text(
            sum(span) / 2, bottom + 0.43, label, ha="center", va="center", fontsize=8.3, color=INK
        )

    for unit in range(NUM_UNITS):
        block(COMPUTE, FORWARD[unit], f"F{unit + 1}", ACTIVATIONS)
        block(COMPUTE, BACKWARD[unit], f"B{unit + 1}", "#B7A8C9")
        block(NETWORK, GATHER_FORWARD[unit], f"gather {unit + 1}", GATHERED)
        block(NETWORK, REDUCE[unit], f"reduce {unit + 1}", "#F3C998")
    for unit, span in enumerate(GATHER_BACKWARD):
        block(NETWORK, span, f"gather {unit + 1}", GATHERED)
    block(COMPUTE, OPTIMIZER_STEP, "update", "#A9D3A3")
    for row, height in ((COMPUTE, 1.63), (NETWORK, 0.53)):
        axes.text(-0.45, height, row, ha="right", va="center", fontsize=9, color=INK)


def ramp(time: np.ndarray, span: tuple[float, float]) -> np.ndarray:
    """Return a line from 0 to 1 over a span of time."""
    return np.clip((time - span[0]) / (span[1] - span[0]), 0, 1)


def during(time: np.ndarray, first: float, last: float) -> np.ndarray:
    """Return 1 between two times and 0 elsewhere."""
    return ((time >= first) & (time < last)).astype(float)


def memory(time: np.ndarray) -> dict[str, np.ndarray]:
    """Return one GPU's memory by category over one step, in arbitrary units."""
    gathered, activations, gradients = np.zeros_like(time), np.zeros_like(time), np.zeros_like(time)
    for unit in range(NUM_UNITS):
        activations += 1.9 * (ramp(time, FORWARD[unit]) - ramp(time, BACKWARD[unit]))
        last_use = FORWARD[unit][1] if unit < NUM_UNITS - 1 else BACKWARD[unit][1]
        gathered += 2.2 * during(time, GATHER_FORWARD[unit][0], last_use)
        if unit < NUM_UNITS - 1:
            gathered += 2.2 * during(time, GATHER_BACKWARD[unit][0], BACKWARD[unit][1])
        gradients += 2.2 * ramp(time, BACKWARD[unit]) * during(time, 0, REDUCE[unit][1])
        gradients += 0.55 * during(time, REDUCE[unit][1], OPTIMIZER_STEP[1])
    constant = np.ones_like(time)
    return {
        "optimizer shard": 4.4 * constant,
        "parameter shard": 2.2 * constant,
        "gradients": gradients,
        "gathered units": gathered,
        "activations": activations,
    }


def draw_memory(axes: Axes) -> None:
    """Draw the stacked memory of one GPU, with the valley and the peak marked."""
    time = np.linspace(-0.3, END, 4000)
    parts = memory(time)
    colors = (OPTIMIZER, PARAMETERS, GRADIENTS, GATHERED, ACTIVATIONS)
    axes.stackplot(time, *parts.values(), labels=list(parts), colors=colors, lw=0)
    total = sum(parts.values())
    axes.plot(time, total, color=INK, lw=1.3)
    peak, valley = float(np.max(total)), float(total[-1])
    top = peak * 1.25
    axes.set_xlim(-0.3, END)
    axes.set_ylim(0, top)
    for height, offset, color, text in (
        (peak, 0.02, INK, "peak: the highest point of a step"),
        (valley, -0.055, "white", "valley: what remains between steps"),
    ):
        axes.axhline(height, color=INK, lw=0.9, ls=(0, (4, 3)))
        axes.text(
            END - 0.1,
            height + top * offset,
            text,
            ha="right",
            fontsize=9.5,
            fontweight="bold",
            color=color,
        )
    for span, text in (((1, 5), "forward"), ((5, 13), "backward"), (OPTIMIZER_STEP, "optimizer")):
        axes.text(sum(span) / 2, -top * 0.075, text, ha="center", fontsize=9, color=INK)
        for edge in span:
            axes.plot((edge, edge), (0, -top * 0.03), color=MUTED, lw=0.8, clip_on=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylabel("memory of one GPU", fontsize=9, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles, labels, loc="upper left", ncols=5, fontsize=9, frameon=False, handlelength=1.2
    )


def main() -> None:
    """Write the picture next to this script."""
    figure = plt.figure(figsize=(11, 8.0))
    grid = figure.add_gridspec(
        3,
        4,
        height_ratios=(1.8, 0.75, 3.0),
        hspace=0.14,
        wspace=0.12,
        left=0.075,
        right=0.985,
        top=0.925,
        bottom=0.05,
    )
    for column, strategy in enumerate(STRATEGIES):
        draw_storage(figure.add_subplot(grid[0, column]), *strategy)
    figure.text(0.02, 0.963, "What each GPU stores", fontsize=13.5, fontweight="bold", color=INK)
    swatches = [Rectangle((0, 0), 1, 1, fc=color) for _, color in ROWS]
    names = [name if name != "optimizer" else "optimizer state" for name, _ in ROWS]
    figure.legend(
        swatches,
        names,
        loc="upper right",
        ncols=3,
        fontsize=9,
        frameon=False,
        bbox_to_anchor=(0.99, 0.995),
        handlelength=1.2,
    )
    schedule = figure.add_subplot(grid[1, :])
    draw_schedule(schedule)
    draw_memory(figure.add_subplot(grid[2, :]))
    title = "One FULL_SHARD step of a model with four units"
    height = schedule.get_position().y1 + 0.012
    figure.text(0.02, height, title, fontsize=13.5, fontweight="bold", color=INK)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
