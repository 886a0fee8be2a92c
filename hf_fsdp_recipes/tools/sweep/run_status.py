"""Finds out from exit status, metrics and logs how a run ended: finished, out of memory, failed or not run."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, read_metrics
from hf_fsdp_recipes.tools.subprocess_runner import find_error

FINISHED, OUT_OF_MEMORY, NOT_RUN = "finished", "OOM", "not run"
LOG_FILE, JOB_LOG_FILE, RANK_LOGS = "log.txt", "slurm.log", "logs"
MAX_REASON_CHARACTERS = 160
# Messages from torch's device and host allocators, Python, and Slurm (after the kernel has killed a task).
# Source: torch 2.13 `c10/cuda/CUDACachingAllocator.cpp` (HIP shares it), `c10/core/impl/alloc_cpu.cpp`; slurmstepd.
OUT_OF_MEMORY_MESSAGE = re.compile(
    r"OutOfMemoryError|(CUDA|HIP|XPU|NPU) out of memory|DefaultCPUAllocator: (can't|not enough)"
    r"|^(\[rank\d+\]: ?)?MemoryError\b|Cannot allocate memory|oom_kill event|oom-kill|OUT_OF_MEMORY",
    re.MULTILINE,
)
RANK_KILLED = re.compile(r"exitcode *: -9|Signal 9 \(SIGKILL\)")


class RunExit(NamedTuple):
    """How a run that the sweep launched ended: the launcher's exit status, and what was observed on this machine."""

    status: int
    kernel_killed: bool = False  # the kernel killed a process for lack of memory during the run
    timed_out: bool = False  # the run was killed at its time limit
    host_peak_bytes: int = 0  # anonymous memory of the largest process


def find_status(directory: Path, num_steps: int, run_exit: RunExit | None = None) -> str:
    """Return "finished", "OOM", "not run", or "failed: " and the reason, from a run's output directory.

    `run_exit` is None for a run that another process started, such as a Slurm job.
    """
    if has_finished(directory, num_steps) and (run_exit is None or run_exit.status == 0):
        return FINISHED
    log = _read_logs(directory)
    was_killed = bool(RANK_KILLED.search(log) or (run_exit and run_exit.status in (-9, 137)))
    if OUT_OF_MEMORY_MESSAGE.search(log) or (was_killed and run_exit and run_exit.kernel_killed):
        return OUT_OF_MEMORY
    if run_exit and run_exit.timed_out:
        return "failed: exceeded its time limit"
    if error := find_error(log):
        return f"failed: {textwrap.shorten(error, MAX_REASON_CHARACTERS, placeholder='...')}"
    if was_killed:
        return "failed: a rank was killed (SIGKILL), but not by the kernel for lack of memory"
    if run_exit is not None:
        return f"failed: exit status {run_exit.status}, no error in its log"
    num_done = count_steps(directory)
    if not log and not num_done:
        return NOT_RUN
    return f"failed: {num_done} of {num_steps} steps and no error in its log; it may still be running"


def has_finished(directory: Path, num_steps: int) -> bool:
    """Return whether a run's metrics record that it took all its steps."""
    return any(entry.get("ended_at_step") == num_steps for entry in read_metrics(directory / METRICS_FILE))


def count_steps(directory: Path) -> int:
    """Return the last step that a run has logged."""
    return max((entry["step"] for entry in read_metrics(directory / METRICS_FILE) if "loss" in entry), default=0)


def _read_logs(directory: Path) -> str:
    files = [directory / LOG_FILE, directory / JOB_LOG_FILE, *sorted((directory / RANK_LOGS).rglob("*"))]
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
