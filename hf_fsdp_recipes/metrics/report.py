"""Writes a run's report.md, report.png and `<run name>.txt` from metrics.jsonl alone.

This also works while the run is going.
"""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.metrics.metrics_file import (
    METRICS_FILE,
    PHASES,
    Entries,
    Entry,
    flatten,
    read_metrics,
    summarize,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# {template of a row's value: name of the row}. A row is left out if a value of it is not known.
ROWS = {
    "{step:,} of {max_steps:,}": "steps",
    "{resumed}": "resumed from step",
    "{model}": "model",
    "{num_ranks} x {device}, {dtype}": "ranks",
    "{num_rows_per_step:,} = {batch_per_device} x {num_ranks} ranks x "
    "{gradient_accumulation_steps} accumulated": "batch size",
    "n/a ({no_mfu})": "MFU",
    "{eval_loss:.4f}": "evaluation loss, last",
    "{first_loss:.4f}": "training loss, mean of the first 5 logged steps or fewer",
    "{last_loss:.4f}": "training loss, mean of the last 5 logged steps or fewer",
    "{step_seconds:.3f} s": "step time, median",
    "{tokens_per_second:,.0f} tokens/s ({tokens_per_second_per_device:,.0f} per rank)": (
        "throughput, padding excluded"
    ),
    "{mfu:.1%} of the dense peak": "MFU",
    "{tokens:,} in {num_steps:,} steps": "tokens in total, padding excluded",
    "{wall_time}": "wall time of these steps",
    "{host_bytes:,.2f} GB": ("host memory at optimizer steps, without cached files, largest rank"),
    "{device_peak_bytes:,.2f} GB": "device memory allocated, peak, largest rank",
    "{device_valley_bytes:,.2f} GB": "device memory allocated between steps (valley), largest rank",
    "{device_reserved_peak_bytes:,.2f} GB": "device memory reserved, peak, largest rank",
    "{shares}": "shares of the time",
}
LOG_HEADER = "    step       loss    seconds  peak memory, largest rank"
LOGGED_STEP = "{step:>8} {loss:>10.4f} {step_seconds:>10.3f} {peak:>23.2f} GB"  # an entry fills it
# {title of a plot: {name of a value or phase: its label}}
PLOTS = {
    "Loss, nats per token": {
        "loss": "training",
        "eval_loss": "evaluation",
    },
    "Tokens/s, without padding": {"tokens_per_second": "all ranks"},
    "MFU, share of the dense peak": {"mfu": "all ranks"},
    "Seconds per step": {phase: phase for phase in PHASES},
    "Host memory without cached files, GB": {"host_bytes": "largest rank"},
    "Device memory of the largest rank, GB": {
        "device_peak_bytes": "peak",
        "device_valley_bytes": "between steps",
    },
}
NOTHING_LOGGED = (
    "No step is logged yet. If the run has ended, set `logging_steps` to at most its number of "
    "steps.\n"
)


def write_report(output_dir: Path) -> Path:
    """Write a run's report.md, plots and log, and return the path of report.md. Rank 0 only.

    Raises:
        ToolError: metrics.jsonl is missing or empty, or one of its lines has missing or invalid
            values.
    """
    file = output_dir / METRICS_FILE
    entries = read_metrics(file)
    if not entries:
        raise ToolError(
            f"{file} is missing or empty. Pass the output_dir of a run with MetricsCallback."
        )
    with explained(ToolError, f"{file} has a line with missing or invalid values; delete it"):
        facts = _find_facts(entries)
        rows = []
        for template, name in ROWS.items():
            with suppress(KeyError):
                rows.append((name, template.format_map(facts)))
        log = [LOGGED_STEP.format_map(flatten(entry)) for entry in entries if "loss" in entry]
        ending = "![plots](report.png)\n"
        if log:
            log.insert(0, LOG_HEADER)
            draw(entries).savefig(output_dir / "report.png")
        else:
            log.append(NOTHING_LOGGED)
            ending = NOTHING_LOGGED
    lines = [f"{name}: {value}" for name, value in rows]
    # The format is from AMD's article on FSDP with ROCm.
    (output_dir / f"{Path(facts['run']).name}.txt").write_text("\n".join([*lines, "", *log, ""]))
    lines = [f"| {name} | {value} |" for name, value in rows]
    report = output_dir / "report.md"
    head = f"# {facts['run']}\n\n| metric | value |\n|---|---|"
    report.write_text("\n".join([head, *lines, "", ending]))
    return report


def _find_facts(entries: Entries) -> Entry:
    """Return the values for ROWS: about the whole run, then about its logged steps."""
    facts: Entry = {}
    for entry in entries:
        if "loss" not in entry:
            facts |= entry
    facts["step"] = max(entry.get("step", 0) for entry in entries)
    facts["num_rows_per_step"] = (
        facts["batch_per_device"] * facts["num_ranks"] * facts["gradient_accumulation_steps"]
    )
    resumed = _find_resumes(entries)
    if resumed:
        facts["resumed"] = ", ".join(map(str, resumed))
    steps = [entry for entry in entries if "loss" in entry]
    if steps:
        losses = [step["loss"] for step in steps]
        seconds = {phase: sum(step["seconds"][phase] for step in steps) for phase in PHASES}
        total = sum(seconds.values())
        shares = [f"{phase} {spent / total:.1%}" for phase, spent in seconds.items() if spent]
        facts |= summarize(steps) | {
            "first_loss": mean(losses[:5]),
            "last_loss": mean(losses[-5:]),
            "tokens": sum(step["tokens"] for step in steps),
            "num_steps": sum(step["num_steps"] for step in steps),
            "wall_time": timedelta(seconds=round(total)),
            "shares": ", ".join(shares),
        }
    return facts


def _find_resumes(entries: Entries) -> list[int]:
    return [entry["from_step"] for entry in entries if entry.get("from_step")]


def draw(entries: Entries) -> "Figure":
    """Return a figure with those plots that have values other than 0.

    The x axis is the training step. Dotted lines mark the steps from which the run was resumed.
    """
    from matplotlib.figure import Figure  # slow to import, and only rank 0 draws

    flat = [flatten(entry) if "loss" in entry else entry for entry in entries]
    plots: dict[str, dict] = {}
    for title, labels in PLOTS.items():
        for name, label in labels.items():
            points = {entry["step"]: entry[name] for entry in flat if name in entry}
            if any(points.values()):
                plots.setdefault(title, {})[label] = points
    figure = Figure(figsize=(8, 2.5 * len(plots)), layout="constrained")
    resumed = _find_resumes(entries)
    for axes, (title, lines) in zip(figure.subplots(len(plots)), plots.items(), strict=True):
        for label, points in lines.items():
            axes.plot(points.keys(), points.values(), ".-", label=label)
        if resumed:
            height = axes.get_xaxis_transform()
            axes.vlines(
                resumed, 0, 1, colors="gray", linestyles=":", label="resumed", transform=height
            )
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        style(axes, title, "optimizer step")
    return figure


def style(axes: "Axes", title: str, x_label: str) -> None:
    """Set a panel's title, x label and grid. Let its y axis begin at 0, or at the lowest value."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    top = axes.get_ylim()[1]
    axes.set_ylim(min(0, axes.dataLim.y0), top + 0.1 * abs(top))
    axes.grid(alpha=0.3)
