"""Runs the recipe script in separate processes on this machine, for rehearsals and sweeps. No process is left behind."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)
# Options of the launcher that replace a template's values for GPUs, and fields of the recipe that go with them.
ON_CPU = "--num_machines=1 --machine_rank=0 --main_process_ip=127.0.0.1 --mixed_precision=no --dynamo_backend=no"
FLOAT32 = ["--bf16=false", "--fp16=false"]
NOT_THE_CAUSE = ("ChildFailedError", "by peer")  # words of the launcher's summary, and of ranks that lost another


def run_recipe(
    template: Path,
    arguments: Sequence[str],
    log: Path,
    is_done: Callable[[], bool] = lambda: False,
    limit_seconds: float = math.inf,
    on_cpu: bool = False,
) -> int | None:
    """Run `hf-fsdp sft` until it ends, `is_done()` is true, or the time limit is reached. Then kill what still runs.

    The command's output is appended to `log`. With `on_cpu`, the template's sharding runs on CPU ranks of this machine.
    Returns the exit status, or None if the command was still running.
    """
    command = [sys.executable, "-m", "hf_fsdp_recipes.cli", "sft", "--accelerate_config", str(template)]
    command += ["--main_process_port", "0", *([*ON_CPU.split(), *FLOAT32] if on_cpu else ()), *arguments]
    environment = os.environ | ({"ACCELERATE_USE_CPU": "true"} if on_cpu else {})
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # then `finally` kills the ranks too
    deadline = time.monotonic() + limit_seconds
    with log.open("a") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        while process.poll() is None and time.monotonic() < deadline and not is_done():
            time.sleep(0.1)
        return process.poll()
    finally:
        kill_tree(process)


def kill_tree(process: "subprocess.Popen[Any]") -> None:
    """Kill the launcher and its ranks. Each rank is killed on its own, because torchrun starts them in separate sessions."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        for member in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def find_error(log: str) -> str:
    """Return the line of a run's output that says why it failed, or an empty string."""
    found = [line for line in ERROR.findall(log) if not any(words in line for words in NOT_THE_CAUSE)]
    return found[-1].strip() if found else ""
