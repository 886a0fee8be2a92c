"""Measures each rank's memory and time in the loading stages before the first step.

Each rank records its stages; `show` gathers and prints them as a table, modeled on the memory log in Hugging Face's
Llama-2-70B FSDP article. MetricsCallback also writes them to metrics.jsonl for the report.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.metrics import memory

MAX_RANKS_SHOWN = 16  # the others are in metrics.jsonl
_recorded: list["Stage"] = []
gathered: list["Stage"] = []  # the stages of all ranks; MetricsCallback writes and clears them


@dataclass(frozen=True)
class Stage:
    """Memory and time of one loading stage on one rank. The `host_*` fields count anonymous memory only."""

    stage: str
    rank: int
    seconds: float
    host_before_bytes: int
    host_after_bytes: int
    host_peak_bytes: int
    device_before_bytes: int
    device_after_bytes: int
    device_peak_bytes: int


@contextlib.contextmanager
def record(name: str) -> Iterator[None]:
    """Record the memory and time that a `with` block takes on this rank, as a loading stage with this name."""
    device_before, _ = memory.device_bytes()
    with memory.HostPeak() as host:
        yield
    device_after, device_peak = memory.device_bytes()
    measured = (host.seconds, host.before_bytes, host.after_bytes, host.peak_bytes)
    _recorded.append(Stage(name, distributed.rank(), *measured, device_before, device_after, device_peak))


def show() -> None:
    """Print the recorded stages of all ranks on rank 0. Collective: every rank must call this."""
    found = [stage for mine in distributed.gather_objects(list(_recorded)) for stage in mine]
    _recorded.clear()
    gathered.extend(found)
    distributed.print_main(format_table(found))


def count_seconds(stages: Sequence[Stage]) -> float | None:
    """Return the slowest rank's loading time in seconds, or None if no stage was recorded."""
    ranks = {stage.rank for stage in stages}
    return max((sum(stage.seconds for stage in stages if stage.rank == rank) for rank in ranks), default=None)


def format_table(stages: Sequence[Stage]) -> str:
    """Return a table with the time and the memory (in MB) of each stage on the first MAX_RANKS_SHOWN ranks."""
    has_device = any(stage.device_peak_bytes for stage in stages)
    columns = f"{'before':>8} {'after':>8} {'peak':>8}"
    lines = [f"{'stage':<16} {'rank':>4} {'seconds':>8}   host MB: {columns}" + f"   device MB: {columns}" * has_device]
    for stage in (one for one in stages if one.rank < MAX_RANKS_SHOWN):
        line = f"{stage.stage:<16} {stage.rank:>4} {stage.seconds:>8.2f}            "
        line += _format_mb(stage.host_before_bytes, stage.host_after_bytes, stage.host_peak_bytes)
        if has_device:
            line += " " * 14 + _format_mb(stage.device_before_bytes, stage.device_after_bytes, stage.device_peak_bytes)
        lines.append(line)
    return "\n".join(lines)


def _format_mb(*values: int) -> str:
    return " ".join(f"{value / 1e6:>8,.0f}" for value in values)
