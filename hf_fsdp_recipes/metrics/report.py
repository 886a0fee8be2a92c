"""Writes a run's report.md, report.png and `<run name>.txt` from metrics.jsonl alone, even during the run."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.errors import ToolError, describe
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, PHASES, Entry, average, read_metrics

REPORT_FILE = "report.md"
MEMORY = {
    "host memory at optimizer steps": "host_bytes",
    "device memory allocated, peak": "device_peak_bytes",
    "device memory allocated between steps (valley)": "device_valley_bytes",
    "device memory reserved, peak": "device_reserved_peak_bytes",
}


def write_report(output_dir: Path) -> Path:
    """Write a run's report.md, plots and log, and return the path of report.md. Rank 0 only.

    Raises:
        ToolError: metrics.jsonl is missing or empty, or one of its lines has missing or invalid values.
    """
    file, report = output_dir / METRICS_FILE, output_dir / REPORT_FILE
    entries = read_metrics(file)
    if not entries:
        raise ToolError(
            f"{file} is missing or empty. Pass the output_dir of a run with MetricsCallback."
        )
    steps = [entry for entry in entries if "loss" in entry]
    try:
        run = next(
            (str(entry["run"]) for entry in reversed(entries) if "run" in entry), output_dir.name
        )
        rows = [*_run_rows(entries), *(_step_rows(steps) if steps else ())]
        (output_dir / f"{Path(run).name}.txt").write_text(_format_log(rows, steps))
        draw(entries).savefig(report.with_suffix(".png"))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ToolError(
            f"{file} has a line with missing or invalid values ({describe(error)}). Delete it."
        ) from error
    table = ["| metric | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    report.write_text("\n\n".join([f"# {run}", "\n".join(table), "![plots](report.png)"]) + "\n")
    return report


def _run_rows(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    starts = [entry for entry in entries if "run" in entry]
    done = max(entry.get("step", 0) for entry in entries)
    yield "steps", f"{done:,}" + (f" of {starts[-1]['max_steps']:,}" if starts else "")
    if resumed := [str(start["from_step"]) for start in starts if start["from_step"]]:
        yield "resumed from step", ", ".join(resumed)
    for start in starts[-1:]:
        batch, ranks, accumulation = (
            start["batch_per_device"],
            start["num_ranks"],
            start["gradient_accumulation_steps"],
        )
        yield "model", start["model"]
        yield "ranks", f"{ranks} x {start['device']}, {start['dtype']}"
        yield (
            "batch size",
            f"{batch * ranks * accumulation:,} = {batch} x {ranks} ranks x {accumulation} accumulated",
        )
        if "no_mfu" in start:
            yield "MFU", f"n/a ({start['no_mfu']})"
    for last in [entry for entry in entries if "eval_loss" in entry][-1:]:
        yield "evaluation loss, last", f"{last['eval_loss']:.4f}"


def _step_rows(steps: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    edge = min(5, len(steps))
    for name, some in (("first", steps[:edge]), ("last", steps[-edge:])):
        mean = statistics.mean(step["loss"] for step in some)
        yield f"training loss, mean of the {name} {edge} logged steps", f"{mean:.4f}"
    if measured := [step["step_seconds"] for step in steps if not step.get("is_warmup")]:
        yield "step time, median", f"{statistics.median(measured):.3f} s"
    if rate := average(steps, "tokens_per_second"):
        per_rank = average(steps, "tokens_per_second_per_device")
        yield "throughput, padding excluded", f"{rate:,.0f} tokens/s ({per_rank:,.0f} per rank)"
    if rate := average(steps, "mfu"):
        yield "MFU", f"{rate:.1%} of the dense peak"
    for name, key in MEMORY.items():
        if largest := max(max(step[key]) for step in steps):
            yield f"{name}, largest rank", f"{largest / 1e9:,.2f} GB"
    seconds = {phase: sum(step["seconds"][phase] for step in steps) for phase in PHASES}
    for phase in PHASES:
        yield f"share of the time: {phase}", f"{seconds[phase] / sum(seconds.values()):.1%}"


def _format_log(rows: Sequence[tuple[str, str]], steps: Sequence[Entry]) -> str:
    """Return the log: name/value pairs, then one line per logged step. The format is from AMD's article on FSDP with ROCm."""
    lines = [f"{name}: {value}" for name, value in rows]
    lines += ["", f"{'step':>8} {'loss':>10} {'seconds':>10} {'peak memory, largest rank':>26}"]
    for step in steps:
        gigabytes = (max(step["device_peak_bytes"]) or max(step["host_bytes"])) / 1e9
        lines.append(
            f"{step['step']:>8} {step['loss']:>10.4f} {step['step_seconds']:>10.3f} {gigabytes:>23.2f} GB"
        )
    return "\n".join([*lines, ""])


def draw(entries: Sequence[Entry]) -> Any:
    """Return a figure with loss, throughput, seconds per phase, and memory. The x axis is the training step."""
    from matplotlib.figure import Figure  # slow to import, and only rank 0 draws

    def gigabytes(key: str) -> Callable[[Entry], float]:
        return lambda entry: max(entry[key]) / 1e9

    def seconds(phase: str) -> Callable[[Entry], float]:
        return lambda entry: entry["seconds"][phase] / entry["num_steps"]

    device = {
        "peak": gigabytes("device_peak_bytes"),
        "between steps (valley)": gigabytes("device_valley_bytes"),
    }
    panels: dict[str, dict[str, Callable[[Entry], float]]] = {
        "Loss, nats per token": {
            "training loss": lambda e: e["loss"],
            "evaluation loss": lambda e: e["eval_loss"],
        },
        "Tokens/s, without padding": {"all ranks": lambda entry: entry["tokens_per_second"]},
        "Seconds per step": {phase: seconds(phase) for phase in PHASES},
        "Host memory at optimizer steps, GB, largest rank": {
            "anonymous pages": gigabytes("host_bytes")
        },
        "Device memory, GB, largest rank": device,
    }
    figure = Figure(figsize=(8, 3 * len(panels)), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(len(panels)), panels.items(), strict=True):
        for label, value in lines.items():
            points = {}
            for entry in entries:
                with contextlib.suppress(KeyError):  # entries of other kinds lack this value
                    points[entry["step"]] = value(entry)
            axes.plot(list(points), list(points.values()), ".-", label=label)
        style(axes, title, "optimizer step")
        axes.legend()
    return figure


def style(axes: Any, title: str, x_label: str) -> None:
    """Set a panel's title, x label and grid. Let its y axis start at 0."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
