"""Writes a run's report.md, report.png and `<run name>.txt` from metrics.jsonl alone.

This also works while the run is going.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.metrics.metrics_file import (
    METRICS_FILE,
    PHASES,
    Entries,
    Entry,
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
    "{first_loss:.4f}": "training loss, mean of the first {num_averaged} logged steps",
    "{last_loss:.4f}": "training loss, mean of the last {num_averaged} logged steps",
    "{step_seconds:.3f} s": "step time, median",
    "{tokens_per_second:,.0f} tokens/s ({tokens_per_second_per_device:,.0f} per rank)": (
        "throughput, padding excluded"
    ),
    "{mfu:.1%} of the dense peak": "MFU",
    "{host_bytes:,.2f} GB": "host memory at optimizer steps, largest rank",
    "{device_peak_bytes:,.2f} GB": "device memory allocated, peak, largest rank",
    "{device_valley_bytes:,.2f} GB": "device memory allocated between steps (valley), largest rank",
    "{device_reserved_peak_bytes:,.2f} GB": "device memory reserved, peak, largest rank",
}
LOGGED_STEP = "{step:>8} {loss:>10.4f} {step_seconds:>10.3f}"  # an entry fills it
# {title of a plot: {name of a value or phase: its label}}
PLOTS = {
    "Loss, nats per token": {
        "loss": "training loss",
        "eval_loss": "evaluation loss",
    },
    "Tokens/s, without padding": {"tokens_per_second": "all ranks"},
    "Seconds per step": {phase: phase for phase in PHASES},
    "Host memory at optimizer steps, GB, largest rank": {"host_bytes": "anonymous pages"},
    "Device memory, GB, largest rank": {
        "device_peak_bytes": "peak",
        "device_valley_bytes": "between steps (valley)",
    },
}


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
    starts = [entry for entry in entries if "run" in entry]
    steps = [entry for entry in entries if "loss" in entry]
    with explained(ToolError, f"{file} has a line with missing or invalid values; delete it"):
        run = str(starts[-1]["run"])
        rows = list(_rows(entries, starts, steps))
        log = [f"{name}: {value}\n" for name, value in rows]
        log.append("\n    step       loss    seconds  peak memory, largest rank\n")
        for step in steps:
            peak_bytes = max(step["device_peak_bytes"]) or max(step["host_bytes"])
            log.append(f"{LOGGED_STEP.format_map(step)} {peak_bytes / 1e9:>23.2f} GB\n")
        figure = draw(entries)
    # The format is from AMD's article on FSDP with ROCm.
    (output_dir / f"{Path(run).name}.txt").write_text("".join(log))
    figure.savefig(output_dir / "report.png")
    report = output_dir / "report.md"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    report.write_text(
        f"# {run}\n\n| metric | value |\n|---|---|\n{table}\n\n![plots](report.png)\n"
    )
    return report


def _rows(entries: Entries, starts: Entries, steps: Entries) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each row: about the whole run, then about logged steps.

    `starts` are those of the `entries` that were written when the run started or resumed. `steps`
    are those of logged steps.
    """
    start = starts[-1]
    facts = start | summarize(steps)
    facts["step"] = max(entry.get("step", 0) for entry in entries)
    facts["num_rows_per_step"] = (
        start["batch_per_device"] * start["num_ranks"] * start["gradient_accumulation_steps"]
    )
    resumed = [str(start["from_step"]) for start in starts if start["from_step"]]
    if resumed:
        facts["resumed"] = ", ".join(resumed)
    for entry in entries:
        with suppress(KeyError):
            facts["eval_loss"] = entry["eval_loss"]
    if steps:
        losses = [step["loss"] for step in steps]
        facts["num_averaged"] = min(5, len(losses))
        facts["first_loss"] = mean(losses[:5])
        facts["last_loss"] = mean(losses[-5:])
    for template, name in ROWS.items():
        with suppress(KeyError):
            yield name.format_map(facts), template.format_map(facts)
    if not steps:
        return
    seconds = {phase: sum(step["seconds"][phase] for step in steps) for phase in PHASES}
    total = sum(seconds.values())
    for phase, spent in seconds.items():
        yield f"share of the time: {phase}", f"{spent / total:.1%}"


def draw(entries: Entries) -> "Figure":
    """Return a figure with loss, throughput, seconds per phase, and memory.

    The x axis is the training step.
    """
    from matplotlib.figure import Figure  # slow to import, and only rank 0 draws

    figure = Figure(figsize=(8, 3 * len(PLOTS)), layout="constrained")
    for axes, title in zip(figure.subplots(len(PLOTS)), PLOTS, strict=True):
        for name, label in PLOTS[title].items():
            points = {}
            for entry in entries:
                with suppress(KeyError):  # entries of other kinds lack this value
                    points[entry["step"]] = _plotted(entry, name)
            axes.plot(points.keys(), points.values(), ".-", label=label)
        axes.legend()
        style(axes, title, "optimizer step")
    return figure


def _plotted(entry: Entry, name: str) -> float:
    """Return seconds per step of a phase, the largest rank's bytes in GB, or the value itself."""
    if name in PHASES:
        return entry["seconds"][name] / entry["num_steps"]
    if name.endswith("bytes"):
        return max(entry[name]) / 1e9
    return entry[name]


def style(axes: "Axes", title: str, x_label: str) -> None:
    """Set a panel's title, x label and grid. Let its y axis start at 0."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
