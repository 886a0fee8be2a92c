"""Memory and seconds of the stages before the first step, per rank: what loading cost, as a table.

Stages are recorded as they happen and kept until the table is asked for; MetricsCallback writes them into
metrics.jsonl. Source of the table's form: the memory log of the Llama-2-70B FSDP article of Hugging Face.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.metrics import memory

MAX_RANKS_SHOWN = 16
_recorded: list["Stage"] = []
gathered: list["Stage"] = []  # of all ranks, on all ranks; MetricsCallback takes them from here


@dataclass(frozen=True)
class Stage:
    """One stage on one rank; memory in bytes, host memory anonymous."""

    stage: str
    rank: int
    seconds: float
    host_before_bytes: int
    host_after_bytes: int
    host_peak_bytes: int
    device_before_bytes: int
    device_after_bytes: int
    device_peak_bytes: int

    def as_metrics(self) -> dict[str, float | int | str]:
        """Return the stage as a line of metrics.jsonl."""
        return asdict(self)


@contextlib.contextmanager
def record(name: str) -> Iterator[None]:
    """Record memory and seconds of a block on this rank. No collective."""
    device_before, _ = memory.device_bytes()
    with memory.HostPeak() as host:
        yield
    device_after, device_peak = memory.device_bytes()
    measured = (host.seconds, host.before_bytes, host.after_bytes, host.peak_bytes)
    _recorded.append(Stage(name, distributed.rank(), *measured, device_before, device_after, device_peak))


def show() -> None:
    """Print the stages of all ranks recorded so far, on rank 0. Collective: every rank must call this."""
    found = [stage for mine in distributed.gather_objects(list(_recorded)) for stage in mine]
    _recorded.clear()
    gathered.extend(found)
    distributed.print_main(format_table(found))


def format_table(stages: Sequence[Stage]) -> str:
    """Return the stages as a table in MB, ranks beyond the first few left out."""
    has_device = any(stage.device_peak_bytes for stage in stages)
    head = f"{'stage':<16} {'rank':>4} {'seconds':>8}   host MB: {'before':>8} {'after':>8} {'peak':>8}"
    lines = [head + (f"   device MB: {'before':>8} {'after':>8} {'peak':>8}" if has_device else "")]
    for stage in stages:
        if stage.rank >= MAX_RANKS_SHOWN:
            continue
        host = (stage.host_before_bytes, stage.host_after_bytes, stage.host_peak_bytes)
        device = (stage.device_before_bytes, stage.device_after_bytes, stage.device_peak_bytes)
        line = f"{stage.stage:<16} {stage.rank:>4} {stage.seconds:>8.2f}            " + _in_mb(host)
        lines.append(line + ("              " + _in_mb(device) if has_device else ""))
    return "\n".join(lines)


def _in_mb(values: Sequence[int]) -> str:
    return " ".join(f"{value / 1e6:>8,.0f}" for value in values)
