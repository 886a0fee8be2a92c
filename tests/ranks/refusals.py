"""Runs a recipe with bad input on two ranks, and finds what is wrong with how they refuse it."""

import ctypes
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks.harness import run_ranks
from tests.recipes.launching import run_recipe

NUM_RANKS = 2
LIMIT_SECONDS = 15.0  # of a core's time
ERROR_LINE = re.compile(r"^[A-Z]\w*Error: .+$", re.MULTILINE)
LOSS = re.compile(r"\{'loss'|'train_runtime'")  # Trainer's log
LOST = re.compile(r"Connection (closed|reset) by peer|connectFullMesh failed")
MAX_CHARACTERS = 700


@dataclass(frozen=True)
class Refusal:
    """How one rank ended: its exit status, the seconds of a core it used, its stdout and stderr."""

    status: Any
    seconds: float
    output: str


def run_captured(argv: Sequence[Any], folder: Path) -> tuple[Any, float]:
    """Run recipes/sft.py as one rank, with its output in `folder`/rank<n>.txt.

    Return its status and seconds.
    """
    from hf_fsdp_recipes import distributed

    distributed.EXIT_SECONDS = 0  # there is no launcher to wait for
    os.chdir(folder)
    file = folder / f"rank{os.environ['RANK']}.txt"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    respect_permissions()
    status: Any = 0
    started = time.process_time()
    try:
        run_recipe(argv)
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
        status = "traceback"
    sys.stdout.flush()
    sys.stderr.flush()
    return status, time.process_time() - started


def respect_permissions() -> None:
    """Make this process obey file permissions even as root."""
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, low and high words
    if library.capget(header, sets) == 0:
        sets[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        library.capset(header, sets)


def run(argv: Sequence[Any], folder: Path, environment: dict[str, str]) -> list[Refusal]:
    """Run the recipe on the ranks; return one refusal per rank. A hang fails the test."""
    results = run_ranks(
        run_captured, NUM_RANKS, argv, folder, environment=environment, timeout_seconds=120
    )
    outputs = [
        (folder / f"rank{rank}.txt").read_text(errors="replace") for rank in range(NUM_RANKS)
    ]
    return [Refusal(*result, text) for result, text in zip(results, outputs, strict=True)]


def find_faults(refusals: Sequence[Refusal], says: str) -> list[str]:
    """Return what is wrong with how the ranks refused an input.

    `says` is a pattern for the message, in any case.
    """
    if all(rank.status == 0 for rank in refusals):
        return ["the run succeeded"]
    # A rank that another one left first lost its connection. Its launcher would have ended it
    # before it could say so.
    present = [rank for rank in refusals if not LOST.search(rank.output)]
    faults = [f"a rank ended with status {rank.status}" for rank in present if rank.status != 1]
    if any(LOSS.search(rank.output) for rank in refusals):
        faults.append("trained before it failed")
    faults += [f"took {rank.seconds:.0f} s" for rank in present if rank.seconds > LIMIT_SECONDS]
    lines = [ERROR_LINE.findall(rank.output) for rank in present]
    if not lines or any(len(found) != 1 or found != lines[0] for found in lines):
        return [*faults, f"the ranks' messages: {lines}"]
    message = lines[0][0]
    if not re.search(says, message, re.IGNORECASE):
        faults.append(f"does not say {says!r}: {message}")
    if len(message) > MAX_CHARACTERS:
        faults.append(f"has {len(message)} characters: {message}")
    return faults
