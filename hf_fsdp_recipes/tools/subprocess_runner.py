"""Runs the recipe script on this machine in separate processes, for a rehearsal or a sweep, and leaves no process behind."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)
NOT_THE_CAUSE = ("ChildFailedError", "by peer")  # the launcher's summary, and ranks that lost another rank


def run_recipe(
    template: Path,
    arguments: Sequence[str],
    log: Path,
    limit_seconds: float,
    is_done: Callable[[], bool] = lambda: False,
) -> int | None:
    """Run `hf-fsdp sft` until it ends, `is_done()` is true, or the time limit is reached; then kill what still runs.

    Its output is appended to `log`. Returns the exit status, or None if it was still running.
    """
    command = [sys.executable, "-m", "hf_fsdp_recipes.cli", "sft", "--accelerate_config", str(template)]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the ranks are killed too
    deadline = time.monotonic() + limit_seconds
    with log.open("a") as output:
        command += ["--main_process_port", "0", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        while process.poll() is None and time.monotonic() < deadline and not is_done():
            time.sleep(0.1)
        return process.poll()
    finally:
        kill_tree(process)


def kill_tree(process: "subprocess.Popen[Any]") -> None:
    """Kill the launcher and its ranks, which torchrun starts in separate sessions."""
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


def put_on_cpu(template: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """Return a template for CPU ranks on this machine; sharding and wrapping stay the same."""
    changes = {"use_cpu": True, "mixed_precision": "no", "num_machines": 1, "num_processes": num_processes}
    template = {key: value for key, value in template.items() if key not in ("main_process_ip", "dynamo_config")}
    if "parallelism_config" in template:
        half = {"dp_replicate_size": 2, "dp_shard_size": num_processes // 2}
        changes["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in half.items()}
    return template | changes
