"""Combines the metrics of all ranks between two logged steps into one entry of metrics.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from hf_fsdp_recipes.metrics.clock import PHASES
from hf_fsdp_recipes.metrics.flops import ModelFlops, TokenCounts

NOT_TRAINING = ("save", "evaluation")  # phases that throughput excludes
RATES = ("tokens_per_second", "tokens_per_second_per_device", "model_flops_per_second_per_device", "mfu", "hfu")


@dataclass(frozen=True)
class MfuInputs:
    """Inputs for computing FLOP/s, MFU and HFU. A field is None if its value is unknown."""

    flops: ModelFlops | None = None
    peak_flops: float | None = None  # FLOP/s that one device reaches at most, without structured sparsity
    is_recomputed: bool = False  # whether activation checkpointing repeats the forward pass


NUM_COUNTS = len(fields(TokenCounts))
MEMORY = ("host_bytes", "device_bytes", "device_valley_bytes", "device_peak_bytes", "device_reserved_peak_bytes")


def pack(counts: torch.Tensor, memory_bytes: Sequence[int], seconds: Mapping[str, float]) -> torch.Tensor:
    """Return one rank's metrics as an int64 tensor to gather, without synchronizing with the device.

    Args:
        counts: (3,) int64 on the rank's device: the fields of `TokenCounts`.
        memory_bytes: one value for each name in MEMORY.
        seconds: for each phase of the clock, its time in seconds. The tensor holds it in microseconds.
    """
    integers = [*memory_bytes, *(round(seconds[phase] * 1e6) for phase in PHASES)]
    return torch.cat([counts, torch.tensor(integers, dtype=torch.int64).to(counts.device, non_blocking=True)])


def summarize(rows: Sequence[Sequence[int]], num_steps: int, inputs: MfuInputs) -> dict[str, Any]:
    """Combine the metrics that `pack` returned on each rank after `num_steps` optimizer steps.

    Returns:
        An entry of metrics.jsonl. For each kind of memory it has a list with one value per rank. `seconds` is the time per
        phase, averaged over the ranks, and `tokens` the sum over the ranks. Throughput and utilization refer to the time
        without saves and evaluation. Unknown metrics are omitted.
    """
    counts = TokenCounts(*(sum(row[i] for row in rows) for i in range(NUM_COUNTS)))
    memory = {name: [row[NUM_COUNTS + i] for row in rows] for i, name in enumerate(MEMORY)}
    start = NUM_COUNTS + len(MEMORY)
    seconds = {phase: sum(row[start + i] for row in rows) / len(rows) / 1e6 for i, phase in enumerate(PHASES)}
    training = sum(value for phase, value in seconds.items() if phase not in NOT_TRAINING)
    entry: dict[str, Any] = {"num_steps": num_steps, "tokens": counts.tokens}
    if num_steps > 0 and training > 0:
        entry["step_seconds"] = training / num_steps
        entry |= _rates(counts, training, len(rows), inputs) if counts.tokens else {}
    return entry | {"seconds": {phase: round(value, 6) for phase, value in seconds.items()}} | memory


def _rates(counts: TokenCounts, seconds: float, num_ranks: int, inputs: MfuInputs) -> dict[str, float]:
    device_seconds = seconds * num_ranks
    rates = {
        "tokens_per_second": counts.tokens / seconds,
        "tokens_per_second_per_device": counts.tokens / device_seconds,
    }
    if inputs.flops is None:
        return rates
    rates["model_flops_per_second_per_device"] = inputs.flops.training(counts) / device_seconds
    if inputs.peak_flops:
        rates["mfu"] = rates["model_flops_per_second_per_device"] / inputs.peak_flops
        if inputs.is_recomputed:
            rates["hfu"] = inputs.flops.hardware(counts) / device_seconds / inputs.peak_flops
    return rates


def average(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric in RATES over all entries after the warm-up, weighted by their training time."""
    means = {}
    for rate in RATES:
        spans = [
            (entry[rate], entry["step_seconds"] * entry.get("num_steps", 1))
            for entry in entries
            if rate in entry and "step_seconds" in entry and not entry.get("is_warmup")
        ]
        total = sum(seconds for _, seconds in spans)
        if total > 0:
            means[rate] = sum(value * seconds for value, seconds in spans) / total
    return means
