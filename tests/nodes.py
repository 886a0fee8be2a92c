"""Starts the preflight as the nodes of a job would, each a process of its own, and leaves none behind."""

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
    """One node's command line, and how it is started."""

    arguments: Sequence[object]
    environment: dict[str, str] = field(default_factory=dict)
    directory: Path = ROOT
    prefix: Sequence[str] = ()


@dataclass
class Outcome:
    """What came of a node."""

    status: int
    output: str
    error: str
    seconds: float


def start(node: Node) -> subprocess.Popen:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RANK", "WORLD_SIZE"))}
    environment = kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        [*node.prefix, *PREFLIGHT, *map(str, node.arguments)],
        env=environment | node.environment,
        cwd=node.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: Sequence[subprocess.Popen], started: float, timeout_seconds: float) -> list[Outcome]:
    outcomes = []
    try:
        for process in processes:
            output, error = process.communicate(timeout=timeout_seconds)
            outcomes.append(Outcome(process.returncode, output, error, time.monotonic() - started))
    finally:
        for process in processes:
            kill_tree(process)
    return outcomes


def run(*nodes: Node, timeout_seconds: float = 60) -> list[Outcome]:
    """Start all nodes at once, wait for all."""
    started = time.monotonic()
    return finish([start(node) for node in nodes], started, timeout_seconds)


def job(numbers: Sequence[int], *more: object, count: int | None = None, **options: object) -> list[Node]:
    """Return the nodes of a job, one a number, with one master address and port and the same further arguments."""
    settings = {"num-nodes": count or len(numbers), "master-addr": "127.0.0.1", "master-port": free_port()} | {
        name.replace("_", "-"): value for name, value in options.items()
    }
    common = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return [Node([*common, "--node-rank", number, *more]) for number in numbers]


def one_message(outcomes: Sequence[Outcome]) -> str:
    """Return the one line that all nodes end with, status 1."""
    assert [outcome.status for outcome in outcomes] == [1] * len(outcomes), outcomes
    messages = {outcome.error for outcome in outcomes}
    assert len(messages) == 1, messages
    (message,) = messages
    assert message.startswith("PreflightError: ") and message.count("\n") == 1, message
    return message
