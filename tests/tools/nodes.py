"""Starts `hf-fsdp preflight` as the nodes of a job do, with one process per node, and leaves no process running."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.ranks.harness import free_port
from tests.recipes.launching import ROOT, kill_tree

PREFLIGHT = [sys.executable, "-c", "from hf_fsdp_recipes.cli import main; main()", "preflight"]


@dataclass
class Node:
    """One node's command line, and how to start it."""

    arguments: Sequence[object]
    environment: dict[str, str] = field(default_factory=dict)
    directory: Path = ROOT
    prefix: Sequence[str] = ()


@dataclass
class NodeResult:
    """Exit status, output and run time of a node."""

    status: int
    output: str
    error: str
    seconds: float


def start(node: Node) -> subprocess.Popen:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE"))
    }
    environment = kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        [*node.prefix, *PREFLIGHT, *map(str, node.arguments)],
        env=environment | node.environment,
        cwd=node.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: Sequence[subprocess.Popen], started: float, timeout_seconds: float) -> list[NodeResult]:
    results = []
    try:
        for process in processes:
            output, error = process.communicate(timeout=timeout_seconds)
            results.append(NodeResult(process.returncode, output, error, time.monotonic() - started))
    finally:
        for process in processes:
            kill_tree(process)
    return results


def run(*nodes: Node, timeout_seconds: float = 200) -> list[NodeResult]:
    """Start all nodes at the same time and wait for all of them."""
    started = time.monotonic()
    return finish([start(node) for node in nodes], started, timeout_seconds)


def make_nodes(
    node_ranks: Sequence[int], *more: object, num_nodes: int | None = None, timeout: float = 120, **options: object
) -> list[Node]:
    """Return one node per node rank, all with the same master address, port and further arguments."""
    settings = {
        "num-nodes": num_nodes or len(node_ranks),
        "master-addr": "127.0.0.1",
        "master-port": free_port(),
        "timeout": timeout,
    }
    settings |= {name.replace("_", "-"): value for name, value in options.items()}
    common = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return [Node([*common, "--node-rank", node_rank, *more]) for node_rank in node_ranks]


def common_error(results: Sequence[NodeResult]) -> str:
    """Return the one-line error that all nodes print before they exit with status 1."""
    assert [result.status for result in results] == [1] * len(results), results
    messages = {result.error for result in results}
    assert len(messages) == 1, messages
    (message,) = messages
    assert message.startswith("PreflightError: ") and message.count("\n") == 1, message
    return message
