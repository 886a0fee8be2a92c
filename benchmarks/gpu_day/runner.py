"""Runs the steps, the most valuable first, each in a process of its own and for a bounded time."""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu_day import steps
from benchmarks.gpu_day.day import FULL, LARGE, LORA, QLORA, ROOT, Day, Figures
from benchmarks.gpu_day.models import make_models
from tests.ranks.harness import free_port, template_environment

PROCESS_BEGAN = psutil.Process().create_time()


@dataclass(frozen=True)
class Step:
    """A step: what it calls, and its seconds.

    Attributes:
        function: takes the day and `inputs`, and returns figures.
        expected: seconds on an H200. The step is left out if less is left.
        limit: seconds after which it is killed.
        num_ranks: its processes. With two, they share one accelerator over gloo.
        is_new_process: whether a rank cannot be a fork.
        starts_ranks: whether `function` starts the ranks itself. It then also takes the seconds
            that it has.
    """

    function: Callable[..., Figures]
    inputs: tuple[Any, ...]
    expected: float
    limit: float = 90.0
    num_ranks: int = 1
    is_new_process: bool = False
    starts_ranks: bool = False


def timed(
    name: str, model: str, settings: dict[str, Any], expected: float, script: str = ""
) -> Step:
    """Return a step that times training."""
    inputs = (model, name, settings, script or "recipes/sft.py")
    return Step(steps.train, inputs, expected)


def exact(num_ranks: int) -> Step:
    return Step(compare_runs, (num_ranks,), 40 + 15 * num_ranks, 200.0, starts_ranks=True)


WITH_RECOMPUTATION = LORA | {"gradient_checkpointing": True}
WITH_LIGER = LORA | {"use_liger_kernel": True}
WRAPPED = LORA | {"packing_strategy": "wrapped"}


def make_steps() -> dict[str, Step]:
    """Return the steps, the most valuable first."""
    return {
        "probe": Step(steps.probe, (), 4),
        "models": Step(make_models, (), 15, 180.0),
        "load_model": Step(steps.load, ("load_model",), 6),
        "load_stock": Step(steps.load, ("stock",), 6),
        "save": Step(steps.save, ("1b", "save", FULL, 60), 80, 150.0),
        "lora": timed("lora", "8b", LORA, 25),
        "lora_trl": timed("lora_trl", "8b", LORA, 20, "trl sft"),
        "exact": exact(1),
        "lora_large": timed("lora_large", "8b", LARGE, 40),
        "resume": Step(steps.resume, (), 45, 120.0),
        "two_ranks": exact(2),
        "qlora": Step(steps.train, ("8b", "qlora", QLORA), 30, is_new_process=True),
        "full": timed("full", "1b", FULL, 10),
        "full_trl": timed("full_trl", "1b", FULL, 10, "trl sft"),
        "command": Step(steps.command, (), 46),
        "save_lora": Step(steps.save, ("8b", "save_lora", LORA, 15), 40),
        "lora_large_trl": timed("lora_large_trl", "8b", LARGE, 40, "trl sft"),
        "lora_wrapped": timed("lora_wrapped", "8b", WRAPPED, 16),
        "lora_recompute": timed("lora_recompute", "8b", WITH_RECOMPUTATION, 20),
        "lora_liger": timed("lora_liger", "8b", WITH_LIGER, 18),
    }


# Two runs without an interruption, then one that is killed and resumed.
RUNS = {
    "whole": ("a", False),
    "again": ("b", False),
    "killed": ("c", True),
    "resumed": ("c", False),
}


def compare_runs(day: Day, num_ranks: int, seconds: float) -> Figures:
    """Compare a run with itself, and with one that was killed and resumed.

    The losses and gradient norms of each step are compared.
    """
    deadline = time.monotonic() + seconds
    found: Figures = {}
    for name, (output, is_killed) in RUNS.items():
        run_name = f"exact-{num_ranks}-{output}"
        step = Step(steps.train_exactly, (run_name, is_killed), 0, num_ranks=num_ranks)
        found[name] = run(day, f"{run_name}-{name}", step, deadline - time.monotonic())
        if "error" in found[name]:
            return {"error": f"in {name}: {found[name]['error']}"}
    whole = found["whole"]["steps"]
    resumed = found["resumed"]["steps"]
    return {
        "a second run has equal losses and norms": found["again"]["steps"] == whole,
        "a resumed run has equal losses and norms": resumed == whole,
        "step: loss, norm": whole,
        "differences of the resumed run": {
            step: row for step, row in resumed.items() if row != whole[step]
        },
    }


def work_on_rank(day: Day, step: Step, rank: int, port: int, result: Path) -> None:
    """Run a step as one rank and write its figures.

    Ends the process, without waiting for its threads.
    """
    log = os.open(day.out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"==== {result.stem}", flush=True)
    has_device = torch.accelerator.is_available()
    template = ROOT / "accelerate_configs" / ("full_shard.yaml" if has_device else "cpu.yaml")
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": 0 if has_device else rank,
        "WORLD_SIZE": step.num_ranks,
        "LOCAL_WORLD_SIZE": step.num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GPU_DAY_RESULT": result,
    }
    try:
        os.environ |= template_environment(template, "--num_processes", str(step.num_ranks))
        os.environ |= {key: str(value) for key, value in ranks.items()}
        if not has_device:
            os.environ["ACCELERATE_USE_CPU"] = "true"
        figures = step.function(day, *step.inputs)
    except BaseException as error:  # SystemExit too: the step must have a line
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {error}"[:600]}
    steps.report(figures)
    sys.stdout.flush()
    os._exit(0)


def run(day: Day, name: str, step: Step, seconds: float) -> Figures:
    """Run a step on its ranks for at most `seconds`, and return rank 0's figures.

    A rank is a fork of this process, which has imported everything but bitsandbytes and has not
    started CUDA. If something has started it, or for bitsandbytes, a rank is a new process.
    """
    if step.starts_ranks:
        return step.function(day, *step.inputs, seconds)
    is_new_process = step.is_new_process or torch.cuda.is_initialized()
    context: Any = multiprocessing.get_context("spawn" if is_new_process else "fork")
    port = free_port()
    results = [day.work / f"{name}-{rank}.json" for rank in range(step.num_ranks)]
    processes = []
    for rank, result in enumerate(results):
        result.unlink(missing_ok=True)
        inputs = (day, step, rank, port, result)
        processes.append(context.Process(target=work_on_rank, args=inputs))
        processes[-1].start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    is_late = any(process.is_alive() for process in processes)
    for process in processes:
        kill_tree(process.pid)
    if results[0].exists():
        return json.loads(results[0].read_text())
    reason = (
        f"stopped after {seconds:.0f} s"
        if is_late
        else f"it ended with status {processes[0].exitcode}"
    )
    return {"error": f"{reason}; see log.txt"}


def kill_tree(pid: int) -> None:
    """Kill a process and what it has started."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def finished_steps(day: Day) -> list[str]:
    """Return the steps that an earlier call has finished."""
    file = day.work / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row["step"] for row in rows if "error" not in row]


def add_result(day: Day, name: str, seconds: float, figures: Figures) -> None:
    row = json.dumps({"step": name, "seconds": seconds, **figures})
    rounded = json.dumps(json.loads(row, parse_float=lambda text: round(float(text), 5)))
    for directory in {day.out, day.work}:
        with (directory / "results.jsonl").open("a") as stream:
            stream.write(rounded + "\n")
    print(rounded[:1500], flush=True)


def main() -> None:
    every_step = make_steps()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="results.jsonl, log.txt, plan.json")
    parser.add_argument("--work", type=Path, help="models and runs, 60 GB; default: OUT")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", nargs="+", choices=every_step, default=list(every_step))
    parser.add_argument("--again", nargs="+", choices=every_step, default=[])
    options = parser.parse_args()
    out = options.out.resolve()
    day = Day(out, (options.work or out).resolve(), options.scale == "small")
    for directory in (day.out, day.work, day.work / "runs"):
        directory.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    finished = finished_steps(day)
    print(f"imports: {time.time() - PROCESS_BEGAN:.1f} s", flush=True)
    for name in options.steps:
        step = every_step[name]
        left = 60 * options.minutes - (time.time() - PROCESS_BEGAN)
        if name in finished and name not in options.again:
            continue
        if left < step.expected and not day.is_small:
            print(f"{name}: left out, {left:.0f} s left", flush=True)
            continue
        started = time.monotonic()
        figures = run(day, name, step, min(step.limit, left))
        add_result(day, name, time.monotonic() - started, figures)
        if name != "save":  # `resume` needs its output
            shutil.rmtree(day.output(name), ignore_errors=True)
    for directory in (day.work / "runs").glob("exact-*"):
        shutil.rmtree(directory)
