"""Starts the real command, `accelerate launch ... recipes/sft.py`, and leaves no process running."""

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
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "ACCELERATE_USE_CPU": "true"} | changes


def run(
    config: Path,
    arguments: Sequence[str],
    *,
    script: str = "recipes/sft.py",
    num_nodes: int = 1,
    timeout_seconds: float = 150,
) -> subprocess.CompletedProcess:
    """Launch a script on this machine, with one launcher per node."""
    from tests.ranks.harness import free_port

    port = str(free_port())
    processes = []
    for node in range(num_nodes):
        command = [*LAUNCH, "--config_file", str(config), "--main_process_port", port]
        if num_nodes > 1:
            command += ["--machine_rank", str(node), "--main_process_ip", "127.0.0.1"]
        processes.append(
            subprocess.Popen(
                [*command, str(ROOT / script), *map(str, arguments)],
                cwd=ROOT,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=timeout_seconds)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            kill_tree(process)
        raise
    code = max((process.returncode for process in processes), key=abs)
    return subprocess.CompletedProcess(processes[0].args, code, "\n".join(outputs), "")


def start(config: Path, **popen: object) -> subprocess.Popen:
    """Start the recipe on two CPU ranks without waiting for its end; it prints nothing unless `popen` says otherwise."""
    from tests.ranks.harness import free_port

    template = ROOT / "accelerate_configs" / "fsdp2_cpu.yaml"
    command = [*LAUNCH, "--config_file", str(template), "--main_process_port", str(free_port())]
    settings = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment()} | popen
    return subprocess.Popen([*command, str(ROOT / "recipes/sft.py"), "--config", str(config)], cwd=ROOT, **settings)


def run_recipe(arguments: Sequence[str], script: str = "recipes/sft.py") -> None:
    """Run a script in this process, as one rank of `tests.ranks.harness.run_ranks`."""
    sys.argv = [str(ROOT / script), *(str(argument) for argument in arguments)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with changes; sections are merged, and None removes a key."""
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = merge(merged.get(key) or {}, value) if isinstance(value, dict) else value
    return {key: value for key, value in merged.items() if value is not None}


def write_recipe(file: Path, values: dict[str, Any], change: Callable[[str], str | bytes] | None = None) -> list[str]:
    """Write a recipe and return its command line."""
    plain = {
        key: str(value) if isinstance(value, Path) else value for key, value in values.items() if value is not None
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


def cpu_variant(template: Path, target: Path, precision: str = "no") -> tuple[Path, int, int]:
    """Derive a CPU variant of a shipped template: only device, precision and counts differ.

    Returns the file, its number of ranks and its number of nodes.
    """
    config = yaml.safe_load(template.read_text())
    is_hybrid_fsdp1 = "HYBRID" in str(config["fsdp_config"].get("fsdp_sharding_strategy"))
    is_hybrid_fsdp2 = "parallelism_config" in config
    nodes = 2 if is_hybrid_fsdp1 else 1
    ranks = 4 if is_hybrid_fsdp1 or is_hybrid_fsdp2 else 2
    config |= {"use_cpu": True, "mixed_precision": precision, "num_machines": nodes, "num_processes": ranks}
    config.pop("dynamo_config", None)  # these tests have no compiler
    if is_hybrid_fsdp2:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": 2,
        }
    if "fsdp_min_num_params" in config["fsdp_config"]:
        config["fsdp_config"]["fsdp_min_num_params"] = 5000  # the tiny model is smaller than the default
    target.write_text(yaml.safe_dump(config))
    return target, ranks, nodes
