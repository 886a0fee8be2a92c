"""The figures of one logging window: from the numbers of every rank to one entry of metrics.jsonl.

Pure arithmetic; measures nothing and asks no rank.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hf_fsdp_recipes.metrics.clock import PARTS
from hf_fsdp_recipes.metrics.flops import ModelFlops, Work

NOT_TRAINING = ("save", "evaluation")  # parts that throughput leaves out
RATES = ("tokens_per_second", "tokens_per_second_per_device", "model_flops_per_second_per_device", "mfu", "hfu")


@dataclass(frozen=True)
class Speed:
    """What turns tokens and seconds into FLOP/s and utilisation.

    Attributes:
        flops: the model's, or None where they cannot be told.
        peak_flops: dense peak of one device in FLOP/s, or None where it is not known.
        is_recomputed: whether activation checkpointing repeats the forward pass.
    """

    flops: ModelFlops | None = None
    peak_flops: float | None = None
    is_recomputed: bool = False


@dataclass
class RankWindow:
    """What one rank measured in one window; `seconds` has an entry for each of `clock.PARTS`."""

    host_bytes: int = 0
    device_bytes: int = 0
    device_valley_bytes: int = 0
    device_peak_bytes: int = 0
    device_reserved_peak_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def as_integers(self) -> list[int]:
        """Return the numbers in a fixed order, seconds as microseconds."""
        *numbers, seconds = asdict(self).values()
        return [*numbers, *(round(seconds[part] * 1e6) for part in PARTS)]


NUM_WORK = 3  # tokens, pairs, window pairs go first
MEMORY = [name for name in RankWindow.__dataclass_fields__ if name != "seconds"]


def pack(work: torch.Tensor, measured: RankWindow) -> torch.Tensor:
    """Put a rank's numbers into one tensor for the gather, without waiting for the device."""
    return torch.cat([work, torch.tensor(measured.as_integers(), dtype=torch.int64).to(work.device, non_blocking=True)])


def summarize(rows: Sequence[Sequence[int]], num_steps: int, speed: Speed) -> dict[str, Any]:
    """Return the figures of a window over all ranks.

    Args:
        rows: what `pack` packed, of every rank.
        num_steps: optimizer steps in the window.
        speed: of this run.

    Returns:
        Memory as lists, rank by rank; `seconds` of each part as the mean of the ranks; `tokens` of all ranks;
        throughput and utilisation over the time that was spent on training. A figure that cannot be told is left out.
    """
    work = Work(*(sum(row[i] for row in rows) for i in range(NUM_WORK)))
    memory = {name: [row[NUM_WORK + i] for row in rows] for i, name in enumerate(MEMORY)}
    begin = NUM_WORK + len(MEMORY)
    seconds = {part: sum(row[begin + i] for row in rows) / len(rows) / 1e6 for i, part in enumerate(PARTS)}
    training = sum(value for part, value in seconds.items() if part not in NOT_TRAINING)
    entry: dict[str, Any] = {"num_steps": num_steps, "tokens": work.tokens}
    if num_steps > 0 and training > 0:
        entry["step_seconds"] = training / num_steps
        entry |= throughput(work.tokens, training, len(rows))
        entry |= utilisation(work, training, len(rows), speed)
    return entry | {"seconds": {part: round(value, 6) for part, value in seconds.items()}} | memory


def throughput(tokens: int, seconds: float, num_ranks: int) -> dict[str, float]:
    """Return tokens a second, of all ranks and of each."""
    if tokens == 0:
        return {}
    return {"tokens_per_second": tokens / seconds, "tokens_per_second_per_device": tokens / seconds / num_ranks}


def utilisation(work: Work, seconds: float, num_ranks: int, speed: Speed) -> dict[str, float]:
    """Return model FLOP/s a device, and MFU (with recomputation also HFU) where the peak is known."""
    if speed.flops is None or work.tokens == 0:
        return {}
    device_seconds = seconds * num_ranks
    found = {"model_flops_per_second_per_device": speed.flops.training(work) / device_seconds}
    if speed.peak_flops:
        found["mfu"] = found["model_flops_per_second_per_device"] / speed.peak_flops
        if speed.is_recomputed:
            found["hfu"] = speed.flops.hardware(work) / device_seconds / speed.peak_flops
    return found


def average(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each rate over the training time of the entries that are no warm-up; nothing if all are."""
    found = {}
    for rate in RATES:
        spans = [
            (entry[rate], entry["step_seconds"] * entry.get("num_steps", 1))
            for entry in entries
            if rate in entry and "step_seconds" in entry and not entry.get("is_warmup")
        ]
        total = sum(seconds for _, seconds in spans)
        if total > 0:
            found[rate] = sum(value * seconds for value, seconds in spans) / total
    return found
