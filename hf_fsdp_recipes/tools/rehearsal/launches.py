"""A launch of the recipe in a process tree of its own: started, watched, killed, and asked why it ended."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from hf_fsdp_recipes.errors import RecipeError

LAUNCH_SECONDS = 240
LOG_FILE = "log.txt"
ERROR = re.compile(r"[\w.]+(Error|Exception)\b(:|$)")  # the last line of a traceback


def start(directory: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start recipes/sft.py with a directory's recipe.yaml and template.yaml; its words go to the directory's log.

    Raises:
        RecipeError: the script is not there, as in an installed package without a checkout.
    """
    script = Path(__file__).resolve().parents[2] / "recipes" / "sft.py"
    if not script.is_file():
        raise RecipeError(f"{script} is not there. Rule: a rehearsal runs the recipes' own script. Remedy: a checkout.")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(directory / "template.yaml"),
    ]
    command += [
        "--main_process_port",
        str(_free_port()),
        str(script),
        "--config",
        str(directory / "recipe.yaml"),
    ]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))
    }
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    log = (directory / LOG_FILE).open("ab")
    return subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def wait_for(process: subprocess.Popen[bytes], is_there: Callable[[], bool], what: str, directory: Path) -> None:
    """Wait for something that a run does.

    Raises:
        RecipeError: the run ended first, with its own error line, or took too long.
    """
    deadline = time.monotonic() + LAUNCH_SECONDS
    while not is_there():
        if process.poll() is not None:
            raise RecipeError(error_line(directory) or f"the run ended with {process.returncode} before {what}")
        if time.monotonic() > deadline:
            kill(process)
            raise RecipeError(f"no {what} within {LAUNCH_SECONDS} s")
        time.sleep(0.05)


def error_line(directory: Path) -> str:
    """Return the run's own error: this package's one line, or the last line of a rank's or the launcher's traceback."""
    lines = (directory / LOG_FILE).read_text(errors="replace").splitlines()
    ours = [
        line for line in lines if line.split(":")[0].endswith("Error") and not line.startswith(("[", " ", "torch."))
    ]
    others = [line.split("]:", 1)[1].strip() for line in lines if line.startswith("[rank") and "]:" in line]
    others = [line for line in others if ERROR.match(line)]
    launchers = [line for line in lines if ERROR.match(line) and "ChildFailedError" not in line]
    return (ours or others or launchers or [""])[0]


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill launcher and ranks, as a failing node would."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)
    process.wait()
