"""Writes a run's report (report.md, its plots and `<run name>.txt`) from metrics.jsonl alone.

A report can therefore be written for a run that is in progress, was killed, or was resumed.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.metrics import aggregate, stages
from hf_fsdp_recipes.metrics.clock import PHASES
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, Entry, last_of_each_step, read_metrics

REPORT_FILE = "report.md"
LOSS_PLOT, THROUGHPUT_PLOT, MEMORY_PLOT = "loss.png", "throughput.png", "memory.png"

Row = tuple[str, str]


def write_report(output_dir: Path, notes: Sequence[str] = ()) -> Path:
    """Write a run's report.md (with `notes` at its end), its plots and `<run name>.txt`. Rank 0 only.

    Raises a DataError if metrics.jsonl is invalid.
    """
    file = output_dir / METRICS_FILE
    try:
        lines = _render(output_dir, read_metrics(file))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # values of the wrong type
        raise DataError(
            f"a line of {file} has missing or invalid values ({error!r:.200}). Correct or delete it."
        ) from error
    for note in notes:
        lines += [note, ""]
    report = output_dir / REPORT_FILE
    report.write_text("\n".join(lines))
    return report


def _render(output_dir: Path, entries: list[Entry]) -> list[str]:
    starts = [entry for entry in entries if "run" in entry]
    steps = last_of_each_step(entries, "loss")
    run = str(starts[-1]["run"]) if starts else output_dir.name
    lines = [f"# {run}", ""]
    if steps:
        evaluations = last_of_each_step(entries, "eval_loss")
        rows = _run_rows(starts, steps) + _loss_rows(steps, evaluations)
        rows += _throughput_rows(starts, steps) + _memory_rows(steps)
        lines += _table("metric", "value", rows)
        (output_dir / f"{Path(run).name}.txt").write_text("\n".join(_log_lines(rows, steps)))
        lines += _write_plots(output_dir, steps, evaluations)
        lines += _phase_section(steps + last_of_each_step(entries, "ended_at_step")[-1:])
    else:
        lines += ["No steps logged.", ""]
    if loaded := [stages.Stage(**entry) for entry in entries if "stage" in entry]:
        lines += ["## Loading", "", "```", stages.format_table(loaded), "```", ""]
    return lines


def _log_lines(rows: Sequence[Row], steps: list[Entry]) -> list[str]:
    """Return the run's metrics and one line per logged step, in the format of the logs in AMD's article on FSDP with ROCm."""
    lines = [f"{name}: {value}" for name, value in rows]
    lines += ["", f"{'step':>8} {'loss':>10} {'seconds':>10} {'peak memory, largest rank':>26}"]
    for entry in steps:
        peak_bytes = max(entry.get("device_peak_bytes") or [0]) or max(entry.get("host_bytes") or [0])
        seconds = f"{entry['step_seconds']:10.3f}" if "step_seconds" in entry else " " * 10
        lines.append(f"{entry['step']:>8} {entry['loss']:>10.4f} {seconds} {peak_bytes / 1e9:>23.2f} GB")
    return [*lines, ""]


def _write_plots(output_dir: Path, steps: list[Entry], evaluations: list[Entry]) -> list[str]:
    from hf_fsdp_recipes.metrics import plots  # imports matplotlib

    figures = {LOSS_PLOT: ("Loss", plots.draw_loss(steps, evaluations))}
    if any("step_seconds" in entry for entry in steps):
        figures[THROUGHPUT_PLOT] = ("Throughput", plots.draw_throughput(steps))
    if any(entry.get("host_bytes") for entry in steps):
        figures[MEMORY_PLOT] = ("Memory", plots.draw_memory(steps))
    lines = []
    for name, (title, figure) in figures.items():
        figure.savefig(output_dir / name)
        lines += [f"![{title}]({name})", ""]
    return lines


def _table(name: str, value: str, rows: Sequence[Row]) -> list[str]:
    return [f"| {name} | {value} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]


def _run_rows(starts: list[Entry], steps: list[Entry]) -> list[Row]:
    done = steps[-1]["step"]
    if not starts:
        return [("steps", f"{done:,}")]
    start = starts[-1]
    is_finished = done >= start["max_steps"]
    rows = [("steps", f"{done:,}" + f" of {start['max_steps']:,} (in progress or interrupted)" * (not is_finished))]
    if resumed := [f"{entry['from_step']:,}" for entry in starts if entry["from_step"]]:
        rows.append(("resumed from step", ", ".join(resumed)))
    parameters = f"{start['num_parameters']:,} parameters"
    if "matmul_parameters" in start:
        parameters += f", {start['matmul_parameters']:,} of them in each token's matrix products"
    batch, ranks, accumulation = (
        start[key] for key in ("batch_per_device", "num_ranks", "gradient_accumulation_steps")
    )
    return [
        *rows,
        ("model", f"{Path(start['model']).name or 'unnamed'}: {parameters}"),
        ("ranks", f"{ranks} x {start['device']}, {start['dtype']}"),
        (
            "batch size",
            f"{batch * ranks * accumulation:,} = {batch} per rank x {ranks} ranks x {accumulation} accumulated",
        ),
    ]


def _loss_rows(steps: list[Entry], evaluations: list[Entry]) -> list[Row]:
    losses = [entry["loss"] + 0.0 for entry in steps]  # raises TypeError for a string or null
    edge = max(1, min(5, len(losses) // 2))
    first, last = sum(losses[:edge]) / edge, sum(losses[-edge:]) / edge
    change = f" ({(last - first) / first:+.0%})" if first else ""
    rows = [
        (f"training loss, mean of the first {edge} logged steps", f"{first:.4f}"),
        (f"training loss, mean of the last {edge} logged steps", f"{last:.4f}{change}"),
    ]
    if evaluations:
        rows.append(("evaluation loss, last", f"{evaluations[-1]['eval_loss']:.4f}"))
    return rows


def _throughput_rows(starts: list[Entry], steps: list[Entry]) -> list[Row]:
    average = aggregate.average(steps)
    measured = [entry for entry in steps if not entry.get("is_warmup")] or steps
    rows = []
    if seconds := [entry["step_seconds"] for entry in measured if "step_seconds" in entry]:
        rows.append(("step time, median", f"{statistics.median(seconds):.2f} s"))
    if "tokens_per_second" in average:
        per_rank = f" ({average['tokens_per_second_per_device']:,.0f} per rank)"
        rows.append(("throughput, mean, padding excluded", f"{average['tokens_per_second']:,.0f} tokens/s{per_rank}"))
    elif any(entry.get("is_warmup") for entry in steps):
        rows.append(("throughput", "n/a (the run ended during warm-up)"))
    if "mfu" in average:
        rows.append(("MFU", f"{average['mfu']:.1%} of dense peak FLOP/s"))
    elif starts and "no_mfu" in starts[-1]:
        rows.append(("MFU", f"n/a ({starts[-1]['no_mfu']})"))
    if "hfu" in average:
        rows.append(("HFU, which also counts recomputed activations", f"{average['hfu']:.1%}"))
    if rate := average.get("model_flops_per_second_per_device"):
        shown = f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:,.1f} GFLOP/s"
        rows.append(("model FLOP/s per rank", shown))
    return rows


def _memory_rows(steps: list[Entry]) -> list[Row]:
    rows = []
    for name, key, extreme in (
        ("host memory, peak over logged steps", "host_bytes", max),
        ("device memory allocated, peak", "device_peak_bytes", max),
        ("device memory allocated between steps (valley)", "device_valley_bytes", min),
        ("device memory reserved by the allocator, peak", "device_reserved_peak_bytes", max),
    ):
        if largest := [max(entry[key]) for entry in steps if any(entry.get(key) or ())]:
            rows.append((f"{name}, largest rank", f"{extreme(largest) / 1e9:,.2f} GB"))
    return rows


def _phase_section(steps: list[Entry]) -> list[str]:
    measured = [entry for entry in steps if "seconds" in entry]
    total = {phase: sum(entry["seconds"].get(phase, 0.0) for entry in measured) for phase in PHASES}
    num_steps, all_seconds = sum(entry.get("num_steps", 1) for entry in measured), sum(total.values())
    if all_seconds == 0:
        return []
    names = {"forward_backward": "forward, backward and clipping", "other": "other (logging, for example)"}
    rows = [
        (names.get(phase, phase), f"{seconds / num_steps:.3f} s ({seconds / all_seconds:.1%})")
        for phase, seconds in total.items()
        if seconds > 0
    ]
    return ["## Time per step", "", *_table("phase", "mean over all ranks and steps", rows)]
