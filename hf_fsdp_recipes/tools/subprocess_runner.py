"""Runs `accelerate launch` in its own session, follows it, and leaves no process running."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import torch

from hf_fsdp_recipes.configs.shipped_files import shipped_directory
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import RecipeError

SFT_SCRIPT = shipped_directory("recipes") / "sft.py"
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # torchrun sets this only for several ranks; set it for one rank too, to make runs comparable
    # Return freed memory to the system immediately. By default, glibc raises this threshold to as much as 32 MB and keeps
    # freed blocks below it, such as those of FSDP units, so peak memory hardly falls as ranks are added. Source: mallopt(3).
    "MALLOC_MMAP_THRESHOLD_": "1048576",
}
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ERROR_LINE = re.compile(
    r"^(?P<prefix>(?:\[[^\]\n]*\]:? ?)*)(?P<error>(?P<module>(?:\w+\.)*)\w*(?:Error|Exception)(?::.*)?)$", re.MULTILINE
)


class Run:
    """A command started by `start`, with its stdout and stderr in `log_file`."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path, unrelated: set[int]) -> None:
        self._process, self.log_file, self._unrelated = process, log_file, unrelated

    @property
    def exit_status(self) -> int | None:
        """The launcher's exit status, or None while it runs."""
        return self._process.poll()

    def poll(self, timeout_seconds: float, interval_seconds: float = 0.05) -> Iterator[int]:
        """Yield 0, 1, 2, ... once per interval until the command exits; raise TimeoutError if that takes too long."""
        deadline, count = time.monotonic() + timeout_seconds, 0
        while self.exit_status is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running after {timeout_seconds:g} s")
            yield count
            count += 1
            time.sleep(interval_seconds)

    def wait(self, timeout_seconds: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the command exits or the condition is true; return whether the condition became true.

        Raises a RecipeError if the command still runs after the timeout.
        """
        try:
            return any(condition() for _ in self.poll(timeout_seconds))
        except TimeoutError as error:
            raise RecipeError(f"The run is {error}. {find_error(self.read_log())}".strip()) from error

    def processes(self) -> list[psutil.Process]:
        """Return the launcher, its descendants, and the orphans that this process has adopted."""
        return _with_descendants(_new_children(self._unrelated))

    def signal_ranks(self, signal_number: int, script: Path) -> None:
        """Send a signal to the launcher's descendants that run `script`."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid != self._process.pid and str(script) in process.cmdline():
                    process.send_signal(signal_number)

    def read_log(self) -> str:
        """Return everything the command has printed."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def describe_failure(self) -> str:
        """Return the error that the command printed, or else its exit status."""
        return find_error(self.read_log()) or f"the run exited with status {self.exit_status}"


@contextlib.contextmanager
def start(command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> Iterator[Run]:
    """Start a command with its output in a file; kill all its processes when the block ends.

    torchrun starts each rank in a new session, so killing the launcher's process group would miss the ranks. This
    process therefore becomes a subreaper (prctl(2)) and adopts ranks whose launcher has died. In the block, a SIGTERM
    to this process raises SystemExit, so that the ranks are killed too. Call this from the main thread: only there can
    Python set a signal handler.
    """
    unrelated = {child.pid for child in psutil.Process().children()}
    process = None
    with _adopt_orphans_and_exit_on_sigterm():
        try:
            with log_file.open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            yield Run(process, log_file, unrelated)
        finally:
            while children := _new_children(unrelated):
                for member in _with_descendants(children):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()
                # Once these have ended, this process adopts their children, and the next iteration kills those.
                psutil.wait_procs(children, timeout=10)
            if process is not None:
                process.wait()


def launch(
    config_file: Path, script: Path, arguments: Sequence[str], log_file: Path, *, on_cpu: bool
) -> AbstractContextManager[Run]:
    """Start a script with `accelerate launch` on this machine; see `start`. Raises a RecipeError if the script does not exist."""
    if not script.is_file():
        raise RecipeError(f"The training script {script} does not exist. Check the path after --script.")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config_file)]
    command += ["--main_process_port", "0", str(script), *arguments]  # port 0: torchrun picks a free one
    return start(command, _launch_environment(on_cpu), log_file)


def is_cpu_machine() -> bool:
    """Return whether to launch CPU ranks, which is the case if there is no accelerator or ACCELERATE_USE_CPU is set."""
    return not torch.accelerator.is_available() or is_true(os.environ.get("ACCELERATE_USE_CPU", "false"))


def find_error(log: str) -> str:
    """Return the line of a log that explains why a run failed, or an empty string.

    Prefers this package's one-line errors, then tracebacks of ranks, then tracebacks of the launcher.
    """

    def order(match: re.Match[str]) -> int:
        return 1 if match["prefix"] else 2 if match["module"] else 0

    matches = (match for match in ERROR_LINE.finditer(log) if "ChildFailedError" not in match["error"])
    best = min(matches, key=order, default=None)
    return best["error"].strip() if best else ""


def _launch_environment(on_cpu: bool) -> dict[str, str]:
    """Return this process's environment without an outer launch's variables; if `on_cpu`, with those that CPU ranks need."""
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    return CPU_ENVIRONMENT | kept | {"ACCELERATE_USE_CPU": "true"} if on_cpu else kept


@contextlib.contextmanager
def _adopt_orphans_and_exit_on_sigterm() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else lambda *_: None
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _new_children(unrelated: set[int]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in unrelated]


def _with_descendants(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    found = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found
