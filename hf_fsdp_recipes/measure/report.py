"""The report of a run: one page and plots from metrics.jsonl. Reads that file, and knows nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPORT_FILE = "report.md"
LOSS_PLOT = "loss.png"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a metrics.jsonl; a torn last line, as a kill leaves it, is passed over."""
    entries = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def write_report(output_dir: Path, notes: Sequence[str] = ()) -> Path:
    """Write `report.md` and `loss.png` beside a metrics.jsonl. Main rank only.

    Args:
        output_dir: the run's directory.
        notes: paragraphs to add below the table.

    Returns:
        The report.
    """
    entries = [entry for entry in read_metrics(output_dir / "metrics.jsonl") if "loss" in entry]
    lines = [f"# {output_dir.name}", ""]
    if entries:
        plot_loss(entries, output_dir / LOSS_PLOT)
        lines += [*_table(entries), "", f"![training loss]({LOSS_PLOT})", ""]
    else:
        lines += ["No step was logged.", ""]
    for note in notes:
        lines += [note, ""]
    report = output_dir / REPORT_FILE
    report.write_text("\n".join(lines))
    return report


def _table(entries: Sequence[dict[str, Any]]) -> list[str]:
    losses = [entry["loss"] for entry in entries]
    edge = max(1, min(5, len(losses) // 2))
    first, last = sum(losses[:edge]) / edge, sum(losses[-edge:]) / edge
    rows = [
        ("steps", f"{entries[-1]['step']:,}"),
        (f"loss, mean of the first {edge} logged steps", f"{first:.4f}"),
        (f"loss, mean of the last {edge} logged steps", f"{last:.4f} ({(last - first) / first:+.0%})"),
        ("ranks", str(len(entries[-1].get("host_bytes", [])) or "?")),
    ]
    seconds = sorted(entry["step_seconds"] for entry in entries if "step_seconds" in entry)
    if seconds:
        rows.append(("seconds a step, median", f"{seconds[len(seconds) // 2]:.2f}"))
    speeds = sorted(entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry)
    if speeds:
        rows.append(("tokens a second, median", f"{speeds[len(speeds) // 2]:,.0f}"))
    host = [max(entry["host_bytes"]) for entry in entries if entry.get("host_bytes")]
    if host:
        rows.append(("host memory of the largest rank, peak of the logged steps", f"{max(host) / 1e6:,.0f} MB"))
    device = [max(entry["device_peak_bytes"]) for entry in entries if any(entry.get("device_peak_bytes", []))]
    if device:
        rows.append(("device memory of the largest rank, peak", f"{max(device) / 1e9:,.2f} GB"))
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def plot_loss(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss over the steps, with its running mean, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, losses = [entry["step"] for entry in entries], [entry["loss"] for entry in entries]
    window = max(1, len(losses) // 10)
    means = [
        sum(losses[max(0, i - window + 1) : i + 1]) / len(losses[max(0, i - window + 1) : i + 1])
        for i in range(len(losses))
    ]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=110)
    axes.plot(steps, losses, ".", color="#9db4c8", label="logged step")
    axes.plot(steps, means, color="#1f5a8c", label=f"mean of {window}" if window > 1 else "loss")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
