"""Runs the recipe script on this machine in separate processes, for a rehearsal or a sweep, and leaves no process behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.tools.files import read_yaml, shipped_directory
from hf_fsdp_recipes.tools.launch import CPU_ENVIRONMENT

ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)
NOT_THE_CAUSE = ("ChildFailedError", "by peer")  # the launcher's summary, and ranks that lost another rank


def run_recipe(
    template: Path,
    arguments: Sequence[str],
    log: Path,
    limit_seconds: float,
    is_done: Callable[[], bool] = lambda: False,
    *,
    on_cpu: bool = True,
) -> int | None:
    """Run recipes/sft.py until it ends, `is_done()` is true, or the time limit is reached; then kill what still runs.

    Args:
        template: an Accelerate config file.
        arguments: the script's arguments.
        log: a file to which the output is appended.
        limit_seconds: time limit.
        is_done: whether to stop the run.
        on_cpu: whether the ranks are CPU ranks.

    Returns:
        The launcher's exit status, or None if the launcher was still running.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(template)]
    command += ["--main_process_port", "0", str(shipped_directory("recipe") / "sft.py"), *arguments]
    environment = dict(os.environ)
    if on_cpu or read_yaml(template).get("use_cpu"):
        environment = CPU_ENVIRONMENT | {"OMP_NUM_THREADS": "1"} | environment | {"ACCELERATE_USE_CPU": "true"}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the ranks are killed too
    deadline = time.monotonic() + limit_seconds
    with log.open("a") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
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
    template = template | {"mixed_precision": "no", "num_machines": 1, "num_processes": num_processes}
    template = {name: value for name, value in template.items() if name not in ("main_process_ip", "dynamo_config")}
    if "parallelism_config" in template:
        half = {"dp_replicate_size": 2, "dp_shard_size": num_processes // 2}
        template["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in half.items()}
    return template
