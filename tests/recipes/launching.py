"""Starts recipes and scripts, and leaves no process running.

They run as ranks of `run_ranks`, which is fast, or with `accelerate launch`.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "accelerate_configs" / "cpu.yaml"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
# What the tests' recipes share: a few steps, each logged.
SETTINGS = {
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1.0e-2,
    "max_length": 64,
    "report_to": "none",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}


def environment(**changes: str) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_"))
    }
    return (
        kept
        | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "ACCELERATE_USE_CPU": "true"}
        | changes
    )


def command(
    config: Path,
    arguments: Sequence[Any],
    script: str = "recipes/sft.py",
    options: Sequence[Any] = (),
) -> list[str]:
    """Return the command of `accelerate launch`; `options` are the launcher's."""
    from tests.ranks.harness import free_port

    port = [] if "--main_process_port" in options else ["--main_process_port", free_port()]
    return [
        *LAUNCH,
        "--config_file",
        *map(str, [config, *port, *options, ROOT / script, *arguments]),
    ]


def run(
    config: Path,
    arguments: Sequence[Any],
    *,
    script: str = "recipes/sft.py",
    num_nodes: int = 1,
    timeout_seconds: float = 150,
) -> subprocess.CompletedProcess:
    """Launch a script, with one launcher per node, and wait for its end.

    stdout and stderr are both in `stdout`.
    """
    from tests.ranks.harness import free_port

    output = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "cwd": ROOT,
        "env": environment(),
    }
    nodes = ["--main_process_port", free_port(), "--main_process_ip", "127.0.0.1", "--machine_rank"]
    options = [[*nodes, rank] for rank in range(num_nodes)] if num_nodes > 1 else [[]]
    processes = [
        subprocess.Popen(command(config, arguments, script, option), **output) for option in options
    ]
    try:
        texts = [process.communicate(timeout=timeout_seconds)[0] for process in processes]
    finally:
        for process in processes:
            kill_tree(process)
    code = max((process.returncode for process in processes), key=abs)
    return subprocess.CompletedProcess(processes[0].args, code, "\n".join(texts), "")


def start(config: Path, **popen: Any) -> subprocess.Popen:
    """Start a recipe on two CPU ranks without waiting for its end.

    It prints nothing unless `popen` says otherwise.
    """
    settings = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "env": environment(),
    } | popen
    return subprocess.Popen(command(CPU, ["--config", config]), cwd=ROOT, **settings)


def run_recipe(arguments: Sequence[Any], script: str = "recipes/sft.py") -> None:
    """Run a script in this process, as one rank of `tests.ranks.harness.run_ranks`."""
    multiprocessing.current_process()._config["daemon"] = (
        False  # daemons could have no workers that load rows
    )
    multiprocessing.set_start_method("fork", force=True)  # as in a launched rank
    sys.argv = [str(ROOT / script), *(str(argument) for argument in arguments)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with changes; sections are merged, and None removes a key."""
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = merge(merged.get(key) or {}, value) if isinstance(value, dict) else value
    return {key: value for key, value in merged.items() if value is not None}


def write_recipe(
    file: Path, values: dict[str, Any], change: Callable[[str], str | bytes] | None = None
) -> list[str]:
    """Write a recipe and return its command line; None removes a setting."""
    plain = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in values.items()
        if value is not None
    }
    text = yaml.safe_dump(plain)
    content = text if change is None else change(text)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return ["--config", str(file)]


def kill_tree(process: subprocess.Popen) -> None:
    try:
        launcher = psutil.Process(process.pid)
        family = [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        member.kill()
    process.wait()
