"""Runs functions and recipes on ranks of the emulated accelerator, or on CPU ranks of the machine that has it."""

import contextlib
import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fsdp_recipes.metrics.metrics_file import read_metrics
from tests.ranks.harness import run_ranks, start_ranks, template_environment
from tests.recipes.launching import ROOT, run_recipe

NUM_DEVICES = 4
DEVICE_MIB = 1024
DEVICE = {"ACCELERATE_USE_CPU": "false"}
CPU = {"ACCELERATE_USE_CPU": "true"}
TEMPLATES = ROOT / "accelerate_configs"
TIMEOUT_SECONDS = 200.0


def device_environment(package: Path) -> dict[str, str]:
    """Return the environment variables with which a new process has the device."""
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"EMU_DEVICES": str(NUM_DEVICES), "EMU_DEVICE_MIB": str(DEVICE_MIB)}
    # For an unknown device, bitsandbytes compiles its kernels, which takes minutes.
    return settings | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}


@contextlib.contextmanager
def fork_server_with_device(package: Path) -> Iterator[None]:
    """Restart the tests' fork server with the device, and afterwards without the device."""
    import torch  # noqa: F401 (before the emulator is on the path: pytest's own process has no device)

    server = multiprocessing.forkserver._forkserver
    with pytest.MonkeyPatch.context() as patch:
        for name, value in device_environment(package).items():
            patch.setenv(name, value)
        server._stop()
        server.ensure_running()
    try:
        yield
    finally:
        server._stop()


def call(package: str, watch: str | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on a rank and record its requests to the device; the package must be on the rank's path."""
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
        environment: Mapping[str, str],
        watch: Path | None = None,
        **options: Any,
    ) -> list[Any]:
        """Run `function(*arguments)` on ranks; return the results in rank order. See `run_ranks`.

        Args:
            environment: DEVICE or CPU, plus the variables that `accelerate launch` sets.
            watch: directory for records of the ranks' requests to the device; `events.read_events` reads them.
        """
        recorded = None if watch is None else str(watch)
        options = {"timeout_seconds": TIMEOUT_SECONDS} | options
        return run_ranks(
            call, num_ranks, str(self.package), recorded, function, *arguments, environment=dict(environment), **options
        )

    def train(
        self,
        settings: Mapping[str, Any],
        template: Path,
        num_ranks: int = 2,
        *,
        on: Mapping[str, str] = DEVICE,
        **options: Any,
    ) -> list[float]:
        """Run recipes/sft.py with these settings to its end; return the losses in `output_dir`, by step."""
        arguments = write_recipe(settings)
        environment = template_environment(template) | on
        self.run(run_recipe, num_ranks, arguments, environment=environment, **options)
        return read_losses(Path(settings["output_dir"]))

    def interrupt(self, settings: Mapping[str, Any], template: Path, number: signal.Signals, at_step: int) -> list[int]:
        """Run recipes/sft.py on two ranks that signal themselves in a step; return their exit statuses.

        They signal once all checkpoints before that step are complete.
        """
        arguments = write_recipe(settings)
        environment = template_environment(template) | DEVICE
        processes, _results = start_ranks(
            call, 2, str(self.package), None, run_and_signal, arguments, settings, number, at_step,
            environment=environment,
        )  # fmt: skip
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            for process in processes:
                process.join(deadline - time.monotonic())
            assert not any(process.is_alive() for process in processes), "a rank hangs"
        finally:
            for process in processes:
                process.kill()
        return [process.exitcode for process in processes]


def write_recipe(settings: Mapping[str, Any]) -> list[str]:
    """Write `<output_dir>.yaml`; return the arguments of recipes/sft.py."""
    file = Path(f"{settings['output_dir']}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({key: str(v) if isinstance(v, Path) else v for key, v in settings.items()}))
    return ["--config", str(file)]


def run_and_signal(arguments: Sequence[str], settings: Mapping[str, Any], number: signal.Signals, at_step: int) -> None:
    """Run the recipe; before step `at_step`, wait for the earlier checkpoints and signal this process."""
    from transformers import Trainer

    compute = Trainer.training_step
    output, every = Path(settings["output_dir"]), settings["save_steps"]

    def training_step(trainer: Trainer, *inputs: Any, **keywords: Any) -> Any:
        if trainer.state.global_step == at_step - 1:
            for step in range(every, at_step, every):
                while not (output / f"checkpoint-{step}" / "manifest.json").exists():
                    time.sleep(0.01)
            os.kill(os.getpid(), number)
        return compute(trainer, *inputs, **keywords)

    Trainer.training_step = training_step
    run_recipe(arguments)


def read_losses(output: Path) -> list[float]:
    """Return a run's losses by step."""
    return [entry["loss"] for entry in read_metrics(output / "metrics.jsonl") if "loss" in entry]


def variant(name: str, directory: Path, precision: str = "no", **fsdp: Any) -> Path:
    """Write a shipped template with changed precision and `fsdp_config` keys; hybrid templates get a mesh of 2 x 2."""
    config = yaml.safe_load((TEMPLATES / f"{name}.yaml").read_text())
    config["mixed_precision"] = precision
    config["fsdp_config"] |= fsdp
    if "parallelism_config" in config:
        sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
        config |= {"parallelism_config": sizes, "num_processes": 4}
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}-{precision}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
