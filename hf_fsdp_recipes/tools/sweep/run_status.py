"""How a run ended, from its exit status and its log: finished, out of memory, or failed and why. Starts nothing."""

import re
from pathlib import Path
from typing import NamedTuple

from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, read_metrics
from hf_fsdp_recipes.tools.sweep import cases

LOG_FILE, JOB_LOG_FILE, RANK_LOGS = "log.txt", "slurm.log", "logs"
MAX_REASON = 160  # characters
# torch's allocators on devices and on the host, Python's own, and what Slurm says when the kernel has killed a task.
# Source: torch 2.13 `c10/cuda/CUDACachingAllocator.cpp` (HIP is the same file), `c10/core/impl/alloc_cpu.cpp`; slurmstepd.
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(CUDA|HIP|XPU|NPU) out of memory|DefaultCPUAllocator: (can't|not enough)"
    r"|^(\[rank\d+\]: ?)?MemoryError\b|Cannot allocate memory|oom_kill event|oom-kill|OUT_OF_MEMORY",
    re.MULTILINE,
)
KILLED = re.compile(r"exitcode *: -9|Signal 9 \(SIGKILL\)")
REASON = re.compile(r"^(?:\[[^\]\n]*\]:? ?)*((?:\w+\.)*\w*(?:Error|Exception): .*)$", re.MULTILINE)
LAUNCHERS_OWN = "ChildFailedError"


class Ending(NamedTuple):
    """What the machine says about a run that is over.

    Attributes:
        status: the launcher's exit status.
        was_short_of_memory: whether the kernel has killed a process for its memory meanwhile.
        is_late: whether it was ended because it took too long.
    """

    status: int
    was_short_of_memory: bool = False
    is_late: bool = False


def find_outcome(directory: Path, steps: int, ending: Ending | None = None) -> str:
    """Return finished, OOM, `failed: why`, or not run.

    Args:
        directory: the run's.
        steps: how many it should have taken.
        ending: None for a run that somebody else has started.
    """
    if cases.has_finished(directory, steps) and (ending is None or ending.status == 0):
        return cases.FINISHED
    text = _read_logs(directory)
    if OUT_OF_MEMORY.search(text):
        return cases.OUT_OF_MEMORY
    was_killed = ending is not None and (ending.status in (-9, 137) or KILLED.search(text) is not None)
    if was_killed and ending is not None and ending.was_short_of_memory:
        return cases.OUT_OF_MEMORY
    if ending is not None and ending.is_late:
        return "failed: did not end within its time"
    reasons = [found for found in REASON.findall(text) if LAUNCHERS_OWN not in found]
    if reasons:
        return f"failed: {_shortened(reasons[0])}"
    if KILLED.search(text):
        return "failed: a rank was killed (SIGKILL), and the kernel says nothing of memory"
    if ending is not None:
        return f"failed: status {ending.status}, no error in its log"
    done = max((entry["step"] for entry in read_metrics(directory / METRICS_FILE) if "loss" in entry), default=0)
    if not text and not done:
        return cases.NOT_RUN
    return f"failed: after {done} of {steps} steps, or under way; no error in its log"


def _read_logs(directory: Path) -> str:
    files = [directory / LOG_FILE, directory / JOB_LOG_FILE]
    files += sorted(file for file in (directory / RANK_LOGS).rglob("*") if file.is_file())
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())


def _shortened(reason: str) -> str:
    reason = " ".join(reason.split())
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."
