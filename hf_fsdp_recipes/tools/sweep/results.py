"""The measurements of a sweep, as a table and as JSON. The columns follow AMD's article on FSDP with ROCm."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path

from hf_fsdp_recipes.metrics import aggregate
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, Entry, last_of_each_step, read_metrics
from hf_fsdp_recipes.tools.sweep.cases import CASE_FILE, read_record
from hf_fsdp_recipes.tools.sweep.run_status import FINISHED, OUT_OF_MEMORY, find_status
from hf_fsdp_recipes.units import count

TABLE_FILE, JSON_FILE = "sweep.md", "sweep.json"
DEVICE, HOST = "device", "host"
MEMORY_KINDS = {
    DEVICE: "reserved by the device allocator",
    HOST: "anonymous host memory, sampled five times per second over the entire run",
}
RATES = ("tokens_per_second", "tokens_per_second_per_device", "mfu")


@dataclass(frozen=True)
class Result:
    """The measurements of a case; a value is None if it is unknown or the case did not finish."""

    template: str
    num_ranks: int
    num_nodes: int
    steps: int
    recipe: str
    status: str  # as `run_status.find_status` returns it
    device: str | None = None
    dtype: str | None = None
    num_parameters: int | None = None
    batch_per_device: int | None = None
    gradient_accumulation_steps: int | None = None
    num_rows: int | None = None  # training sequences after packing; None for a stream
    no_mfu: str | None = None  # why there is no MFU
    peak_memory_bytes: int | None = None  # peak of the largest rank
    memory_kind: str | None = None  # a key of MEMORY_KINDS
    measured_steps: int | None = None  # steps after the warm-up
    step_seconds: float | None = None  # median of the measured steps
    epoch_steps: int | None = None
    epoch_seconds: float | None = None  # extrapolated from step_seconds
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    mfu: float | None = None


def read_results(directory: Path) -> list[Result]:
    """Return the results of a sweep, sorted by template and rank count."""
    found = [_read_result(file.parent) for file in directory.glob(f"*/{CASE_FILE}")]
    return sorted(found, key=lambda result: (result.template, result.num_ranks))


def _read_result(directory: Path) -> Result:
    record = read_record(directory)
    settings = record["settings"]
    found = {name: record[name] for name in ("template", "num_ranks", "num_nodes")}
    found |= {"steps": settings["steps"], "recipe": settings["recipe_file"]}
    found["status"] = record.get("status") or find_status(directory, settings["steps"])
    if found["status"] != FINISHED:
        return Result(**found)
    entries = read_metrics(directory / METRICS_FILE)
    logged = last_of_each_step(entries, "loss")
    start = [entry for entry in entries if "run" in entry][-1]
    found |= {each.name: start[each.name] for each in fields(Result) if each.name in start.keys() - found.keys()}
    return Result(**found, **_memory(logged, record), **_speed(logged, found))


def _memory(logged: Sequence[Entry], record: Entry) -> Entry:
    for name in ("device_reserved_peak_bytes", "device_peak_bytes"):
        peak_bytes = max((max(entry.get(name) or [0]) for entry in logged), default=0)
        if peak_bytes:
            return {"peak_memory_bytes": peak_bytes, "memory_kind": DEVICE}
    peak_bytes = record.get("host_peak_bytes")  # recorded for a case that ran on this machine
    return {"peak_memory_bytes": peak_bytes, "memory_kind": HOST} if peak_bytes else {}


def _speed(logged: Sequence[Entry], run: Entry) -> Entry:
    """Return times and rates of the steps after the warm-up, or an empty dict if there are no such steps."""
    measured = [entry for entry in logged if "step_seconds" in entry and not entry.get("is_warmup")]
    if not measured:
        return {}
    seconds = statistics.median(entry["step_seconds"] for entry in measured)
    found: Entry = {"measured_steps": len(measured), "step_seconds": seconds}
    if "num_rows" in run:
        rows_per_step = run["batch_per_device"] * run["num_ranks"] * run["gradient_accumulation_steps"]
        epoch_steps = -(-run["num_rows"] // rows_per_step)
        found |= {"epoch_steps": epoch_steps, "epoch_seconds": seconds * epoch_steps}
    rates = aggregate.average(measured)
    return found | {name: rates[name] for name in RATES if name in rates}


def write_json(directory: Path, results: Sequence[Result]) -> None:
    """Write sweep.json. Values that are unknown are left out."""
    cases = [{key: value for key, value in asdict(result).items() if value is not None} for result in results]
    (directory / JSON_FILE).write_text(json.dumps({"cases": cases}, indent=1) + "\n", encoding="utf-8")


def write_table(directory: Path, results: Sequence[Result], plots: Sequence[tuple[str, str]]) -> Path:
    """Write sweep.md: the table, notes on its figures, and the plots. `plots` lists their titles and file names."""
    finished = [result for result in results if result.status == FINISHED]
    lines = [f"# Sweep of {Path(results[0].recipe).name}", ""]
    lines += [_describe_run(finished[0]), ""] if finished else []
    lines += [
        "| template | ranks | peak memory per rank | epoch (h:mm:ss) | step | tokens/s | tokens/s per rank | MFU |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(_cells(result))} |" for result in results),
        "",
        *(f"- {note}" for note in [*_notes(finished), *_failures(results)]),
        "",
    ]
    for title, file in plots:
        lines += [f"![{title}]({file})", ""]
    table = directory / TABLE_FILE
    table.write_text("\n".join(lines), encoding="utf-8")
    return table


def _describe_run(result: Result) -> str:
    batch, accumulation = result.batch_per_device, result.gradient_accumulation_steps
    text = f"{result.num_parameters:,} parameters; {count(batch or 0, 'sequence')} per rank and micro-batch"
    text += f", {accumulation} micro-batches per step" if accumulation != 1 else ""
    return f"{text}; {result.device}, {result.dtype}."


def _cells(result: Result) -> list[str]:
    ranks = str(result.num_ranks) + (f" on {result.num_nodes} nodes" if result.num_nodes > 1 else "")
    epoch = None if result.epoch_seconds is None else timedelta(seconds=round(result.epoch_seconds))
    memory_gb = None if result.peak_memory_bytes is None else result.peak_memory_bytes / 1e9
    memory = ("{:,.2f} GB", memory_gb) if result.status == FINISHED else ("{}", result.status.split(":")[0])
    figures: list[tuple[str, object]] = [
        memory,
        ("{}", epoch),
        ("{:.3g} s", result.step_seconds),
        ("{:,.1f}", result.tokens_per_second),
        ("{:,.1f}", result.tokens_per_second_per_device),
        ("{:.1%}", result.mfu),
    ]
    return [result.template, ranks, *("–" if value is None else text.format(value) for text, value in figures)]


def _notes(finished: Sequence[Result]) -> list[str]:
    """Return notes on how the figures were measured, and why some are missing."""
    kinds = sorted({result.memory_kind for result in finished if result.memory_kind})
    notes = [f"Peak memory: largest rank; {MEMORY_KINDS[kind]}." for kind in kinds]
    measured = sorted({result.measured_steps for result in finished if result.measured_steps})
    if measured:
        counts = "/".join(map(str, measured))
        notes.append(f"Step: median of {counts} steps after the warm-up. Tokens: padding not counted.")
    elif finished:
        notes.append("Step: n/a (every case ended within its throughput_warmup_steps; use more --steps).")
    if rows := sorted({result.num_rows for result in finished if result.epoch_seconds and result.num_rows}):
        counts = "/".join(f"{count:,}" for count in rows)
        notes.append(f"Epoch: extrapolated from the step time to all {counts} sequences; no full epoch was run.")
    elif measured:
        notes.append("Epoch: n/a (the dataset is streamed).")
    return notes + [f"MFU: n/a ({reason})." for reason in sorted({r.no_mfu for r in finished if r.no_mfu})]


def _failures(results: Sequence[Result]) -> list[str]:
    return [
        f"{result.template} on {count(result.num_ranks, 'rank')}: {result.status}."
        for result in results
        if result.status not in (FINISHED, OUT_OF_MEMORY)
    ]
