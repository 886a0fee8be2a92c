"""`make gpu-day` in small: all of its steps on CPU ranks, without accelerator and network."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.gpu_day.day import ROOT, Day
from benchmarks.gpu_day.runner import Step, make_steps, run

# These need Liger's kernels, which need a GPU.
NEED_A_GPU = {"lora_large", "lora_large_trl", "lora_liger"}


def measure(directory, *options, **environment):
    """Run the steps in small; return the figures of each."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_day",
        "--out",
        str(directory),
        "--scale",
        "small",
        *options,
    ]
    kept = {key: value for key, value in os.environ.items() if key != "ACCELERATE_USE_CPU"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=kept | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def check_figures(found):
    """Check what must hold on any device."""
    assert {
        name: row["error"]
        for name, row in found.items()
        if "error" in row and name not in NEED_A_GPU
    } == {}
    ours, stock = (
        found[name]["mean logsumexp, the same for both"] for name in ("load_model", "load_stock")
    )
    assert ours == pytest.approx(stock, rel=1e-5)
    for name in {"exact", "two_ranks"} & set(found):
        assert found[name]["a second run has equal losses and norms"]
        assert found[name]["a resumed run has equal losses and norms"]
    assert found["lora"]["last losses"] == pytest.approx(found["lora_trl"]["last losses"], abs=1e-3)
    assert len(found["save"]["training stands still s"]) == 2
    assert found["resume"]["resumed from"] == found["save"]["last save at step"]
    made = ("report.md", "export", "export_merged", "checkpoint-10")
    assert [found["command"][name] for name in made] == [True] * len(made)


@pytest.mark.rehearsal
@pytest.mark.timeout(600)
def test_all_steps_run_on_cpu_ranks_and_a_second_call_repeats_none(tmp_path):
    found = measure(tmp_path)
    check_figures(found)
    before = (tmp_path / "results.jsonl").read_text()
    assert len(before.splitlines()) == len(found) == len(make_steps())
    measure(tmp_path, "--steps", "probe", "lora")
    assert (tmp_path / "results.jsonl").read_text() == before


def _sleep(day):
    subprocess.run(["sleep", "60"])


def _end(day):
    os._exit(3)


def test_a_step_that_hangs_is_killed_and_one_that_dies_is_an_error(tmp_path):
    day = Day(tmp_path, tmp_path, is_small=True)
    started = time.monotonic()
    assert run(day, "hangs", Step(_sleep, (), 1), 2.0)["error"] == "stopped after 2 s; see log.txt"
    assert time.monotonic() - started < 10
    assert (
        run(day, "dies", Step(_end, (), 1), 20.0)["error"] == "it ended with status 3; see log.txt"
    )
    assert not [
        child for child in psutil.Process().children(recursive=True) if child.name() == "sleep"
    ]
