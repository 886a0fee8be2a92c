"""Watches a training run.

The time and tokens of its steps, its memory, and the kernels of two steps.
"""

import statistics
import time
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu_day.day import Figures
from hf_fsdp_recipes.metrics import flops

NUM_WARMUP_STEPS = 3
NUM_PROFILED_STEPS = 2
NUM_KERNELS = 12
GAP_SECONDS = 1e-4


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class Stopwatch(TrainerCallback):
    """Times the steps after the warm-up, and then profiles the last two. `figures` has the result.

    Every step waits for the accelerator. Both scripts are watched in the same way.
    """

    def __init__(self) -> None:
        self.figures: Figures = {}
        self._marks: list[tuple[float, int, int]] = []  # seconds, tokens, pairs of tokens so far

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()
        self._device = torch.get_device_module(args.device)
        self._has_device = args.device.type != "cpu"
        self._counts = torch.zeros(2, dtype=torch.int64, device=args.device)
        self._flops = flops.find_model_flops(kwargs["model"])
        kwargs["model"].register_forward_pre_hook(self._count, with_kwargs=True)
        if self._has_device:
            self.figures["peak before training GB"] = self._device.max_memory_allocated() / 1e9

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            self._counts += flops.count_tokens(kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == NUM_WARMUP_STEPS - 1 and self._has_device:
            self._device.reset_peak_memory_stats()
        if state.global_step == args.max_steps - NUM_PROFILED_STEPS:
            self._profiler = start_profiler()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        last_timed_step = args.max_steps - NUM_PROFILED_STEPS
        if NUM_WARMUP_STEPS <= state.global_step <= last_timed_step:
            self._marks.append((time.perf_counter(), *self._counts.tolist()))
        if state.global_step == last_timed_step and self._has_device:
            free_bytes, total_bytes = self._device.mem_get_info()
            self.figures["allocated peak GB"] = self._device.max_memory_allocated() / 1e9
            self.figures["reserved peak GB"] = self._device.max_memory_reserved() / 1e9
            self.figures["device used GB"] = (total_bytes - free_bytes) / 1e9

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._profiler.stop()
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        step_seconds = [after[0] - before[0] for before, after in pairs]
        first = self._marks[0]
        last = self._marks[-1]
        seconds = last[0] - first[0]
        num_tokens = last[1] - first[1]
        self.figures["step s, median"] = statistics.median(step_seconds)
        self.figures["step s, fastest and slowest"] = [min(step_seconds), max(step_seconds)]
        self.figures["tokens a step"] = num_tokens / len(step_seconds)
        self.figures["tokens/s"] = num_tokens / seconds
        self.figures["tokens/s in the median step"] = (
            num_tokens / len(step_seconds) / statistics.median(step_seconds)
        )
        if torch.cuda.is_available():
            peak = flops.find_peak_flops(self._device.get_device_name(), "bfloat16")
            used = self._flops.training(num_tokens, last[2] - first[2])
            self.figures["mfu"] = used / seconds / peak
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.figures["last losses"] = losses[-3:]
        profile = summarize_profile(self._profiler)
        # The profiler itself delays the steps that it watches.
        busy_seconds = profile["device works s"] / NUM_PROFILED_STEPS
        self.figures["share of the median step in which the device works"] = (
            busy_seconds / self.figures["step s, median"]
        )
        self.figures |= profile


def start_profiler() -> torch.profiler.profile:
    """Start torch's profiler on the accelerator, or on the CPU if there is none."""
    activity = torch.profiler.ProfilerActivity.CPU
    if torch.cuda.is_available():
        activity = torch.profiler.ProfilerActivity.CUDA
    profiler = torch.profiler.profile(activities=[activity])
    profiler.start()
    return profiler


def summarize_profile(profiler: torch.profiler.profile) -> Figures:
    """Return the time in which the device works, its pauses, and the longest kernels."""
    device_type = torch.autograd.DeviceType.CPU
    if torch.cuda.is_available():
        device_type = torch.autograd.DeviceType.CUDA
    spans = []
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        is_work = event.device_type() == device_type and not event.is_user_annotation()
        if is_work and event.duration_ns() > 0:
            start = event.start_ns() / 1e9
            spans.append((start, start + event.duration_ns() / 1e9, event.name()[:70]))
    spans.sort()
    busy_seconds = 0.0
    long_gaps = []
    busy_until = spans[0][0]
    seconds_by_name: dict[str, list[float]] = {}
    for start, end, name in spans:
        if start - busy_until > GAP_SECONDS:
            long_gaps.append(start - busy_until)
        busy_seconds += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
        seconds_by_name.setdefault(name, []).append(end - start)
    longest = sorted(seconds_by_name.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]
    return {
        "profile s": busy_until - spans[0][0],
        "device works s": busy_seconds,
        "pauses over 0.1 ms: number, s": [len(long_gaps), sum(long_gaps)],
        "kernels": [f"{sum(each):.4f} s, {len(each)} x {name}" for name, each in longest],
    }
