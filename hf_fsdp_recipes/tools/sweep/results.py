"""What a sweep found: the figures of every case, as a table and as JSON. Reads what the cases have left.

Source of the figures' choice: the results section of AMD's article on FSDP with ROCm (memory, epoch time and step time
against the number of GPUs, with the cases that ran out of memory among the results).
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.metrics import aggregate
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, last_of_each_step, read_metrics
from hf_fsdp_recipes.tools.sweep import cases, run_status

TABLE_FILE, JSON_FILE = "sweep.md", "sweep.json"
DEVICE_RESERVED, HOST_SAMPLED, HOST_LOGGED = "device", "host", "host at logged steps"
MEMORY_MEANS = {
    DEVICE_RESERVED: "reserved by the allocator on the device",
    HOST_SAMPLED: "anonymous memory of the host, sampled five times a second from the start of the run to its end",
    HOST_LOGGED: "anonymous memory of the host after each step",
}

Result = dict[str, Any]


def collect(directory: Path) -> list[Result]:
    """Return the result of every case in a sweep's directory, by template and number of ranks."""
    found = [_result(file.parent) for file in directory.glob(f"*/{cases.CASE_FILE}")]
    return sorted(found, key=lambda result: (result["template"], result["num_ranks"]))


def _result(directory: Path) -> Result:
    case = cases.read(directory)
    steps = int(case["settings"]["steps"])
    result = {name: case[name] for name in ("template", "num_ranks", "num_nodes")} | {"steps": steps}
    result["recipe"] = case["settings"]["recipe_file"]
    result["outcome"] = case.get("outcome") or run_status.find_outcome(directory, steps)
    if result["outcome"] != cases.FINISHED:
        return result
    entries = read_metrics(directory / METRICS_FILE)
    start = [entry for entry in entries if "run" in entry][-1]
    logged = last_of_each_step(entries, "loss")
    for name in (
        "device",
        "dtype",
        "num_parameters",
        "batch_per_device",
        "gradient_accumulation_steps",
        "num_rows",
        "no_mfu",
    ):
        if name in start:
            result[name] = start[name]
    return result | _memory(logged, case) | _speed(logged, result)


def _memory(logged: Sequence[Result], case: Result) -> Result:
    """Return the peak of the largest rank in bytes, and what of."""
    for name, kind in (("device_reserved_peak_bytes", DEVICE_RESERVED), ("device_peak_bytes", DEVICE_RESERVED)):
        peaks = [max(entry.get(name) or [0]) for entry in logged]
        if any(peaks):
            return {"peak_memory_bytes": max(peaks), "memory_kind": kind}
    if case.get("host_peak_bytes"):
        return {"peak_memory_bytes": case["host_peak_bytes"], "memory_kind": HOST_SAMPLED}
    host = [max(entry["host_bytes"]) for entry in logged if entry.get("host_bytes")]
    return {"peak_memory_bytes": max(host), "memory_kind": HOST_LOGGED} if host else {}


def _speed(logged: Sequence[Result], result: Result) -> Result:
    """Return step and epoch time and throughput of the steps after the warm-up; nothing where there are none."""
    measured = [entry for entry in logged if "step_seconds" in entry and not entry.get("is_warmup")]
    if not measured:
        return {}
    found: Result = {"measured_steps": len(measured)}
    found["step_seconds"] = statistics.median(entry["step_seconds"] for entry in measured)
    if "num_rows" in result:
        rows_a_step = result["batch_per_device"] * result["num_ranks"] * result["gradient_accumulation_steps"]
        found["epoch_steps"] = -(-result["num_rows"] // rows_a_step)
        found["epoch_seconds"] = found["step_seconds"] * found["epoch_steps"]
    rates = aggregate.average(measured)
    return found | {
        name: rates[name] for name in ("tokens_per_second", "tokens_per_second_per_device", "mfu") if name in rates
    }


def write_json(directory: Path, results: Sequence[Result]) -> None:
    """Write sweep.json."""
    (directory / JSON_FILE).write_text(json.dumps({"cases": list(results)}, indent=1) + "\n", encoding="utf-8")


def write_table(directory: Path, results: Sequence[Result], plots: Sequence[tuple[str, str]]) -> Path:
    """Write sweep.md: the table, what its figures mean, and the plots (title and file)."""
    finished = [result for result in results if result["outcome"] == cases.FINISHED]
    lines = [f"# Sweep of {Path(results[0]['recipe']).name}", "", *_head(finished), *_rows(results), ""]
    lines += [f"- {note}" for note in _notes(results, finished)] + [""]
    for title, file in plots:
        lines += [f"![{title}]({file})", ""]
    table = directory / TABLE_FILE
    table.write_text("\n".join(lines), encoding="utf-8")
    return table


def _head(finished: Sequence[Result]) -> list[str]:
    if not finished:
        return []
    first = finished[0]
    batch, accumulation = first["batch_per_device"], first["gradient_accumulation_steps"]
    described = f"{first['num_parameters']:,} parameters, {batch} sequence{'s'[: batch != 1]} a rank and micro-batch"
    described += f", {accumulation} accumulated" if accumulation > 1 else ""
    return [f"{described}; {first['device']}, {first['dtype']}.", ""]


def _rows(results: Sequence[Result]) -> list[str]:
    lines = [
        "| template | ranks | peak memory of a rank | epoch | step | tokens/s | tokens/s and rank | MFU |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        lines.append("| " + " | ".join(_cells(result)) + " |")
    return lines


def _cells(result: Result) -> list[str]:
    ranks = str(result["num_ranks"]) + (f" on {result['num_nodes']} nodes" if result["num_nodes"] > 1 else "")
    if result["outcome"] != cases.FINISHED:
        return [result["template"], ranks, result["outcome"].split(":")[0], *["–"] * 5]

    def shown(name: str, written: Any) -> str:
        return written(result[name]) if name in result else "–"

    return [
        result["template"],
        ranks,
        shown("peak_memory_bytes", lambda value: f"{value / 1e9:,.2f} GB"),
        shown("epoch_seconds", duration),
        shown("step_seconds", lambda value: f"{value:.3g} s"),
        shown("tokens_per_second", _rate),
        shown("tokens_per_second_per_device", _rate),
        shown("mfu", lambda value: f"{value:.1%}"),
    ]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _notes(results: Sequence[Result], finished: Sequence[Result]) -> list[str]:
    notes = []
    for kind in sorted({result["memory_kind"] for result in finished if "memory_kind" in result}):
        notes.append(f"Peak memory: {MEMORY_MEANS[kind]}, of the largest rank.")
    if measured := sorted({result["measured_steps"] for result in finished if "measured_steps" in result}):
        notes.append(
            f"Step: median of {'/'.join(map(str, measured))} steps after the warm-up; tokens: padding not counted."
        )
    elif finished:
        notes.append("No step time: no case has outlasted its warm-up (throughput_warmup_steps). Remedy: more --steps.")
    if rows := sorted({result["num_rows"] for result in finished if "epoch_seconds" in result}):
        sequences = "/".join(f"{count:,}" for count in rows)
        notes.append(f"Epoch: extrapolated, the step's time for all {sequences} sequences; no epoch was run.")
    elif measured:
        notes.append("Epoch: not told, a stream has none.")
    notes += [f"MFU: not told, {reason}." for reason in sorted({r["no_mfu"] for r in finished if "no_mfu" in r})]
    for result in results:
        if result["outcome"] not in (cases.FINISHED, cases.OUT_OF_MEMORY):
            notes.append(f"{result['template']} on {result['num_ranks']} ranks: {result['outcome']}.")
    return notes
