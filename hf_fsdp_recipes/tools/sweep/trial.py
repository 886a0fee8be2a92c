"""Runs one case of a sweep on this machine: `accelerate launch`, watched, and no process left behind."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from hf_fsdp_recipes.metrics import memory
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, read_metrics
from hf_fsdp_recipes.tools.sweep import cases, run_status

SAMPLE_SECONDS = 0.2  # how often memory is looked at
SAMPLES_A_LOOK = 5  # how often new processes and steps are looked for, in samples
LAUNCHER = [sys.executable, "-m", "accelerate.commands.launch"]
CPU_VARIABLES = {
    "OMP_NUM_THREADS": "1",  # what torchrun sets for several ranks but not for one: cases have to be comparable
    # Units that were gathered and freed go back to the system at once. glibc would raise this threshold to 32 MB and
    # keep them, and the peak would be that of its heap, hardly lower on more ranks. Source: mallopt(3).
    "MALLOC_MMAP_THRESHOLD_": "1048576",
}
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run(case: cases.Case, script: Path, time_limit_seconds: float, on_step: Callable[[int], None]) -> str:
    """Run a case to its end and return its outcome, which is kept in its directory too.

    Args:
        case: what to run.
        script: what `accelerate launch` starts, recipes/sft.py.
        time_limit_seconds: after which it is ended.
        on_step: called with the number of steps taken so far, about once a second.
    """
    cases.begin(case)
    # Port 0: torchrun takes one that is free, on the loopback of this machine.
    command = [*LAUNCHER, "--config_file", str(case.directory / cases.TEMPLATE_FILE), "--main_process_port", "0"]
    command += [str(script), *case.arguments]
    metrics = case.directory / METRICS_FILE

    def look() -> None:
        on_step(max((entry["step"] for entry in read_metrics(metrics) if "loss" in entry), default=0))

    log = case.directory / run_status.LOG_FILE
    ending, peak_bytes = watch(command, environment(case.is_on_cpu), log, time_limit_seconds, look)
    found = run_status.find_outcome(case.directory, case.steps, ending)
    cases.end(case, found, peak_bytes)
    return found


def environment(is_on_cpu: bool) -> dict[str, str]:
    """Return the environment of a case: this one, without what an outer `accelerate launch` has set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_"))}
    if not is_on_cpu:
        return kept
    return CPU_VARIABLES | kept | {"ACCELERATE_USE_CPU": "true"}


def watch(
    command: Sequence[str], variables: dict[str, str], log: Path, limit_seconds: float, look: Callable[[], None]
) -> tuple[run_status.Ending, int]:
    """Run a command with its output in a file; return how it ended and the peak of its largest process in bytes."""
    kills_before, deadline = _kernel_kills(), time.monotonic() + limit_seconds
    family: list[psutil.Process] = []
    peak_bytes, number, is_late = 0, 0, False
    with _own_children(), log.open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None and not is_late:
            if number % SAMPLES_A_LOOK == 0:
                family = _below(psutil.Process())
                look()
            peak_bytes = max([peak_bytes, *map(_host_bytes, family)])
            number, is_late = number + 1, time.monotonic() > deadline
            time.sleep(SAMPLE_SECONDS)
    status = -signal.SIGKILL if is_late else process.wait()
    return run_status.Ending(status, _kernel_kills() > kills_before, is_late), peak_bytes


@contextlib.contextmanager
def _own_children() -> Iterator[None]:
    """Kill whatever a block has started and left, its orphans too, also when SIGTERM ends this process.

    torchrun starts ranks in sessions of their own; as a subreaper this process gets those whose parent has died.
    Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    before = {process.pid for process in psutil.Process().children()}
    is_linux, is_main_thread = sys.platform.startswith("linux"), threading.current_thread() is threading.main_thread()
    if is_linux:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    handler: Any = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)) if is_main_thread else None
    try:
        yield
    finally:
        while left := [child for child in psutil.Process().children() if child.pid not in before]:
            for member in [*left, *(below for child in left for below in _below(child))]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(left, timeout=10)
        if is_linux:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if is_main_thread:
            signal.signal(signal.SIGTERM, handler)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _host_bytes(process: psutil.Process) -> int:
    try:
        return memory.host_bytes(process.pid)
    except OSError:
        return 0  # it has ended


def _kernel_kills() -> int:
    """Return how many processes the kernel has killed for their memory since this machine started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
