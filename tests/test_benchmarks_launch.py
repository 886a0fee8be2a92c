"""Benchmarks run in small, so that a change of the package cannot break one unnoticed.

Only those that can leave docs/measured.md as it is.
"""

import subprocess
import sys

import pytest

from benchmarks.gpu_day.day import ROOT

SMALL = (
    "save --parameters 1e6 --ranks 2",
    "export --parameters 1e6 --repeats 1 --print",
    "load --parameters 1e6 --repeats 1 --only 4-bit,_nested_scales",
)


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALL, ids=lambda command: command.split()[0])
def test_a_benchmark_prints_its_table(command):
    name, *options = command.split()
    options = [option.replace("_", " ") for option in options]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert f"`python -m benchmarks.{name}" in done.stdout
