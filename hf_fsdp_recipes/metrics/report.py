"""The report of a run: one page and plots from metrics.jsonl. Reads that file, and knows nothing else.

So it can be written of a run that is under way, was killed, or was resumed.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.metrics import aggregate
from hf_fsdp_recipes.metrics.clock import PARTS
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, last_of_each_step, read_metrics

REPORT_FILE = "report.md"
LOSS_PLOT, THROUGHPUT_PLOT, MEMORY_PLOT = "loss.png", "throughput.png", "memory.png"
MAX_STAGE_RANKS = 4  # rows of the table of loading; the largest of the others follow in metrics.jsonl

Row = tuple[str, str]


def render(output_dir: Path) -> Path:
    """Write the report of a directory that someone names.

    Raises:
        DataError: there is no metrics.jsonl.
    """
    if not (output_dir / METRICS_FILE).is_file():
        raise DataError(
            f"{output_dir} holds no {METRICS_FILE}. Rule: a run with `report: true` writes one into its output_dir."
        )
    return write_report(output_dir)


def write_report(output_dir: Path, notes: Sequence[str] = ()) -> Path:
    """Write `report.md` and its plots beside a metrics.jsonl. Main rank only.

    Args:
        output_dir: the run's directory.
        notes: paragraphs to add at the end.

    Returns:
        The report.
    """
    entries = read_metrics(output_dir / METRICS_FILE)
    starts = [entry for entry in entries if "run" in entry]
    steps = last_of_each_step(entries, "loss")
    lines = [f"# {starts[-1]['run'] if starts else output_dir.name}", ""]
    if steps:
        evaluations = last_of_each_step(entries, "eval_loss")
        rows = (
            _run_rows(starts, steps) + _loss_rows(steps, evaluations) + _speed_rows(starts, steps) + _memory_rows(steps)
        )
        lines += [*_table(("", ""), rows), "", *_write_plots(output_dir, steps, evaluations)]
        lines += _split_section(steps + last_of_each_step(entries, "ended_at_step")[-1:])
    else:
        lines += ["No step was logged.", ""]
    lines += _stage_section([entry for entry in entries if "stage" in entry])
    for note in notes:
        lines += [note, ""]
    report = output_dir / REPORT_FILE
    report.write_text("\n".join(lines))
    return report


def _write_plots(output_dir: Path, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> list[str]:
    from hf_fsdp_recipes.metrics import plots

    figures = {LOSS_PLOT: ("training loss", plots.draw_loss(steps, evaluations))}
    if any("step_seconds" in entry for entry in steps):
        figures[THROUGHPUT_PLOT] = ("throughput", plots.draw_throughput(steps))
    if any(entry.get("host_bytes") for entry in steps):
        figures[MEMORY_PLOT] = ("memory", plots.draw_memory(steps))
    lines = []
    for name, (title, figure) in figures.items():
        figure.savefig(output_dir / name)
        lines += [f"![{title}]({name})", ""]
    return lines


def _table(head: Row, rows: Sequence[Row]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _run_rows(starts: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[Row]:
    done = steps[-1]["step"]
    rows = [("steps", f"{done:,}")]
    if not starts:
        return rows
    start = starts[-1]
    if done < start["max_steps"]:
        rows = [("steps", f"{done:,} of {start['max_steps']:,}: under way, stopped or killed")]
    resumed = [f"{entry['from_step']:,}" for entry in starts if entry["from_step"]]
    if resumed:
        rows.append(("resumed after step", ", ".join(resumed)))
    parameters = f"{start['num_parameters']:,} parameters"
    if "matmul_parameters" in start:
        parameters += f", {start['matmul_parameters']:,} of them multiplied with each token"
    rows.append(("model", f"{Path(start['model']).name or 'of its own making'}: {parameters}"))
    batch, accumulation = start["batch_per_device"], start["gradient_accumulation_steps"]
    rows.append(("ranks", f"{start['num_ranks']} x {start['device']}, {start['dtype']}"))
    rows.append(("sequences a step", f"{batch} a rank x {start['num_ranks']} ranks x {accumulation} accumulated"))
    return rows


def _loss_rows(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> list[Row]:
    losses = [entry["loss"] for entry in steps]
    edge = max(1, min(5, len(losses) // 2))
    first, last = sum(losses[:edge]) / edge, sum(losses[-edge:]) / edge
    change = f" ({(last - first) / first:+.0%})" if first else ""
    rows = [
        (f"loss, mean of the first {edge} logged steps", f"{first:.4f}"),
        (f"loss, mean of the last {edge} logged steps", f"{last:.4f}{change}"),
    ]
    if evaluations:
        rows.append(("evaluation loss, last", f"{evaluations[-1]['eval_loss']:.4f}"))
    return rows


def _speed_rows(starts: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[Row]:
    average = aggregate.average(steps)
    measured = [entry for entry in steps if not entry.get("is_warmup")] or steps
    rows = []
    if seconds := [entry["step_seconds"] for entry in measured if "step_seconds" in entry]:
        rows.append(("seconds a step, median", f"{statistics.median(seconds):.2f}"))
    if "tokens_per_second" in average:
        each = average.get("tokens_per_second_per_device")
        share = f" ({each:,.0f} a rank)" if each else ""
        rows.append(("tokens a second, mean, padding not counted", f"{average['tokens_per_second']:,.0f}{share}"))
    elif any(entry.get("is_warmup") for entry in steps):
        rows.append(("tokens a second", "not averaged: the run has not outlasted its warm-up"))
    if "mfu" in average:
        rows.append(("model FLOPs utilisation (MFU)", f"{average['mfu']:.1%} of the dense peak"))
    elif starts and "no_mfu" in starts[-1]:
        rows.append(("model FLOPs utilisation (MFU)", f"not told: {starts[-1]['no_mfu']}"))
    if "hfu" in average:
        rows.append(("the same with recomputed activations (HFU)", f"{average['hfu']:.1%}"))
    if rate := average.get("model_flops_per_second_per_device"):
        shown = f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:,.1f} GFLOP/s"
        rows.append(("model FLOPs of a rank", shown))
    return rows


def _memory_rows(steps: list[dict[str, Any]]) -> list[Row]:
    rows = []
    if host := [max(entry["host_bytes"]) for entry in steps if entry.get("host_bytes")]:
        rows.append(("host memory of the largest rank, peak of the logged steps", f"{max(host) / 1e6:,.0f} MB"))
    device = [entry for entry in steps if any(entry.get("device_peak_bytes", []))]
    if device:
        peak = max(max(entry["device_peak_bytes"]) for entry in device)
        rows.append(("device memory of the largest rank, peak", f"{peak / 1e9:,.2f} GB"))
    if valleys := [max(entry["device_valley_bytes"]) for entry in device if entry.get("device_valley_bytes")]:
        rows.append(("the same between steps (valley)", f"{min(valleys) / 1e9:,.2f} GB"))
    if reserved := [max(entry.get("device_reserved_peak_bytes") or [0]) for entry in device]:
        rows.append(("device memory reserved by the allocator, peak", f"{max(reserved) / 1e9:,.2f} GB"))
    return rows


def _split_section(steps: list[dict[str, Any]]) -> list[str]:
    measured = [entry for entry in steps if "seconds" in entry]
    total = {part: sum(entry["seconds"].get(part, 0.0) for entry in measured) for part in PARTS}
    num_steps, whole = sum(entry.get("num_steps", 1) for entry in measured), sum(total.values())
    if whole == 0:
        return []
    names = {"forward_backward": "forward, backward and clipping", "other": "logging and the rest"}
    rows = [
        (names.get(part, part), f"{seconds / num_steps:.3f} s ({seconds / whole:.1%})")
        for part, seconds in total.items()
        if seconds > 0
    ]
    return [*_table(("part of a step", "mean of the ranks, all steps"), rows), ""]


def _stage_section(found: list[dict[str, Any]]) -> list[str]:
    shown = [entry for entry in found if entry["rank"] < MAX_STAGE_RANKS]
    if not shown:
        return []
    lines = ["| loading | rank | seconds | host MB before | after | peak |", "|---|---|---|---|---|---|"]
    for entry in shown:
        host = (entry["host_before_bytes"], entry["host_after_bytes"], entry["host_peak_bytes"])
        memory = " | ".join(f"{value / 1e6:,.0f}" for value in host)
        lines.append(f"| {entry['stage']} | {entry['rank']} | {entry['seconds']:.2f} | {memory} |")
    return [*lines, ""]
