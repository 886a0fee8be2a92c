"""Runs functions on ranks of the emulated accelerator."""

import contextlib
import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks, start_ranks

NUM_DEVICES = 4
DEVICE = {"ACCELERATE_USE_CPU": "false"}
TIMEOUT_SECONDS = 200.0
HYBRID = {"dp_replicate_size": 2, "dp_shard_size": 2}


@contextlib.contextmanager
def fork_server_with_device(package: Path) -> Iterator[None]:
    """Restart the tests' fork server with the device, and afterwards without the device."""
    # Before the emulator is on the path: pytest's own process has no device.
    import torch  # noqa: F401

    server = multiprocessing.forkserver._forkserver
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    # For an unknown device, bitsandbytes compiles its kernels, which takes minutes.
    settings = {"PYTHONPATH": path, "EMU_DEVICES": str(NUM_DEVICES), "EMU_DEVICE_MIB": "1024"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings, "TORCHDYNAMO_DISABLE": "1"}.items():
            patch.setenv(name, value)
        server._stop()
        server.ensure_running()
    try:
        yield
    finally:
        server._stop()


def call(package: str, watch: str | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on a rank, with the device's package on its path; record requests if asked."""
    sys.path.append(package)
    if watch is not None:
        from torch_npu import watch as recorder

        recorder.start(watch)
    return function(*arguments)


@dataclass(frozen=True)
class Ranks:
    """Starts ranks that have the device.

    Attributes:
        package: directory of the built emulator.
    """

    package: Path

    def run(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *arguments: Any,
        fsdp: Mapping[str, Any] | None = None,
        precision: str = "no",
        watch: Path | None = None,
    ) -> list[Any]:
        """Run a function on ranks, with FSDP2 and these changes to its config.

        Return the results in rank order. `watch` is a directory for records of the ranks' requests
        to the device, which `events.read_events` reads.
        """
        environment = environment_for(num_ranks, fsdp, precision) | DEVICE
        recorded = None if watch is None else str(watch)
        inputs = (str(self.package), recorded, function, *arguments)
        return run_ranks(
            call, num_ranks, *inputs, environment=environment, timeout_seconds=TIMEOUT_SECONDS
        )

    def run_to_signal(self, function: Callable[..., Any], *arguments: Any) -> list[int]:
        """Run a function on two ranks that signal themselves; return their exit statuses."""
        environment = environment_for(2) | DEVICE
        inputs = (str(self.package), None, function, *arguments)
        processes, _results = start_ranks(call, 2, *inputs, environment=environment)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            for process in processes:
                process.join(deadline - time.monotonic())
            assert not any(process.is_alive() for process in processes), "a rank hangs"
        finally:
            for process in processes:
                process.kill()
        return [process.exitcode for process in processes]


def environment_for(
    num_ranks: int, fsdp: Mapping[str, Any] | None = None, precision: str = "no"
) -> dict[str, str]:
    """Return the variables of a launch; four ranks are sharded in two replicas."""
    return fsdp_environment(FSDP2 | dict(fsdp or {}), HYBRID if num_ranks == 4 else None, precision)


def signal_in_step(step: int, number: signal.Signals, complete: Path) -> None:
    """Let this rank's Trainer signal itself in a step, once the file `complete` exists."""
    from transformers import Trainer

    compute = Trainer.training_step

    def training_step(trainer: Trainer, *inputs: Any, **keywords: Any) -> Any:
        if trainer.state.global_step == step - 1:
            while not complete.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)
        return compute(trainer, *inputs, **keywords)

    Trainer.training_step = training_step
