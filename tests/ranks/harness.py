"""Runs a function on several gloo ranks quickly, with a timeout and every rank's traceback.

A fork server imports torch, transformers and TRL once; each rank is a fork of that server.
Accelerate's own code gives a rank the environment that `accelerate launch` would set for a config
file.
"""

import contextlib
import faulthandler
import functools
import io
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

PRELOAD = ["torch", "transformers", "trl", "peft", "datasets", "accelerate", "tests.ranks.preload"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)

FSDP2 = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
FSDP1 = {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True}
COMMON = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_sync_module_states": False,
}


def fsdp_environment(
    fsdp: dict[str, Any], parallel: dict[str, int] | None = None, precision: str = "no"
) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for an FSDP config."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "use_cpu": True,
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": 2,
        "fsdp_config": COMMON | fsdp,
    }
    if parallel:
        config["parallelism_config"] = {
            f"parallelism_config_{key}": value for key, value in parallel.items()
        }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        return template_environment(Path(file.name))


def template_environment(template: Path, *options: str) -> dict[str, str]:
    """Return the variables that `accelerate launch --config_file template` sets for the ranks.

    They come from Accelerate itself.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(
        ["--config_file", str(template), "--main_process_port", "0", *options, "script.py"]
    )
    arguments, _, _ = _validate_launch_command(arguments)
    environment = prepare_multi_gpu_env(arguments)
    return {
        key: value
        for key, value in environment.items()
        if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
        and os.environ.get(key) != value
    }


@functools.cache
def _stack_directory() -> tempfile.TemporaryDirectory[str]:
    """Return the directory for the stacks of hanging ranks.

    It is created on first use, because the ranks import this module too.
    """
    return tempfile.TemporaryDirectory()


def free_port() -> int:
    """Return a port below the range of the system's ports for outgoing connections."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("127.0.0.1", random.SystemRandom().randint(20_000, 32_000)))
            return server.getsockname()[1]


def start_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    environment: dict[str, str | None] | None = None,
) -> tuple[list[Any], Any]:
    """Start `function(*arguments)` on every rank.

    Return the processes and their queue, which must outlive them. A variable of the environment
    that is None is not set on the ranks.
    """
    results = context.Queue()
    port = free_port()
    # As `accelerate launch` sets it on CPUs.
    num_threads = max(1, (os.cpu_count() or 1) // world_size)
    processes = []
    for rank in range(world_size):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(num_threads),
            **(environment or {}),
        }
        inputs = (function, arguments, rank, variables, results, _stack_directory().name)
        process = context.Process(target=_run, args=inputs, daemon=True)
        process.start()
        processes.append(process)
    return processes, results


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    environment: dict[str, str | None] | None = None,
    timeout_seconds: float = 90.0,
    expect_failure: bool = False,
) -> list[Any]:
    """Run `function(*arguments)` on every rank; return the results in rank order.

    If a rank raises, dies or outlasts the timeout, the test fails with every rank's traceback. With
    `expect_failure` every rank must raise, and the exceptions' (class name, text) are returned.
    """
    processes, results = start_ranks(function, world_size, *arguments, environment=environment)
    outcomes: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout_seconds
    try:
        while len(outcomes) < world_size and time.monotonic() < deadline:
            try:
                rank, kind, value = results.get(timeout=0.2)
                outcomes[rank] = (kind, value)
            except Exception:
                if all(not process.is_alive() for process in processes) and results.empty():
                    break
    finally:
        for process in processes:
            process.join(timeout=5 if len(outcomes) == world_size else 0.1)
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # the rank writes its stacks
                process.join(timeout=1)
                process.kill()
                process.join()
    wanted = "error" if expect_failure else "result"
    if [kind for kind, _ in outcomes.values()] == [wanted] * world_size:
        values = [outcomes[rank][1] for rank in range(world_size)]
        return [value[:2] for value in values] if expect_failure else values
    accounts = [_account(rank, processes[rank], outcomes.get(rank)) for rank in range(world_size)]
    pytest.fail("\n".join(accounts))


def printed_by(function: Callable[..., Any], *arguments: Any) -> str:
    """Call a function on a rank of `run_ranks`; return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        function(*arguments)
    return printed.getvalue()


def _account(rank: int, process: Any, outcome: tuple[str, Any] | None) -> str:
    if outcome is None:
        file = Path(_stack_directory().name, str(process.pid))
        where = file.read_text() if file.exists() else ""
        how = f"exit code {process.exitcode}; killed at the timeout if -9"
        return f"--- rank {rank}: no report ({how})\n{where}"
    kind, value = outcome
    return f"--- rank {rank}: {kind}\n{value[2] if kind == 'error' else value}"


def _run(
    function: Callable[..., Any],
    arguments: Any,
    rank: int,
    variables: dict[str, str | None],
    results: Any,
    stack_directory: str,
) -> None:
    for name, value in ({"TORCHELASTIC_RUN_ID": None} | variables).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    unclosed = _make_warnings_errors()
    # The fork server has imported torch without the variable.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Open until the process ends.
    stack_file = Path(stack_directory, str(os.getpid())).open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack_file)  # for a rank that outlasts the timeout
    try:
        result = function(*arguments)
        if unclosed:
            raise unclosed[0]
        results.put((rank, "result", result))
    except BaseException as error:
        results.put((rank, "error", (type(error).__name__, str(error), traceback.format_exc())))
    finally:
        results.close()
        results.join_thread()
        sys.stdout.flush()
        os._exit(0)  # a rank that failed alone must not wait for the others in a destructor


def _make_warnings_errors() -> list[ResourceWarning]:
    """Turn warnings that blame this package into errors; pytest's filters do not reach the ranks.

    Return a list that collects the errors that Python cannot raise, because a finalizer warned.
    """
    unclosed = []

    def report(unraisable: Any) -> None:
        sys.__unraisablehook__(unraisable)
        if isinstance(unraisable.exc_value, ResourceWarning):
            unclosed.append(unraisable.exc_value)

    warnings.filterwarnings("error", module="hf_fsdp_recipes")
    sys.unraisablehook = report
    return unclosed


def read_losses(output_dir: Path) -> list[float]:
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    entries = read_metrics(Path(output_dir) / "metrics.jsonl")
    return [entry["loss"] for entry in entries if "loss" in entry]
