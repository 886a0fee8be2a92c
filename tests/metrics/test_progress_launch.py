"""Progress bars are shown on rank 0's terminal and nowhere else, in real runs too."""

import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from tests.recipes.launching import LAUNCH, ROOT, environment

BAR = """
import time
from hf_fsdp_recipes.metrics import progress
with progress.bar(4_000_000, "load weights") as shown:
    for _ in range(4):
        shown.update(1_000_000)
        time.sleep(0.15)
"""
SWITCHED_OFF = {
    "not rank 0": ({"RANK": "1"}, ""),
    "the Hub's bars are off": ({"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, ""),
    "transformers' bars are off": ({}, "from transformers.utils import logging; logging.disable_progress_bar()\n"),
}


def on_a_terminal(command, variables, timeout_seconds=60):
    """Run a command whose stderr is a terminal; return its exit status and output."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))  # tqdm shows no bars in a terminal without a size
    process = subprocess.Popen(command, env=variables, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    received = b""
    try:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux raises EIO when the other end is closed
                break
            if not part:
                break
            received += part
        status = process.wait(timeout=timeout_seconds)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return status, received.decode(errors="replace")


def bars_allowed(**changes):
    return {k: v for k, v in environment().items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"} | changes


def test_terminal_shows_bytes_rate_and_time_left():
    status, seen = on_a_terminal([sys.executable, "-c", BAR], bars_allowed())
    assert status == 0, seen
    assert re.search(r"load weights: +[257]\d%.*[123]\.00M/4\.00M \[\d\d:\d\d<\d\d:\d\d, .*MB/s\]", seen), seen
    assert re.search(r"load weights: 100%.*4\.00M/4\.00M", seen)


@pytest.mark.parametrize(
    "reason",
    [pytest.param(reason, marks=() if reason == "not rank 0" else pytest.mark.slow) for reason in SWITCHED_OFF],
)
def test_terminal_shows_nothing_if(reason):
    changes, before = SWITCHED_OFF[reason]
    status, seen = on_a_terminal([sys.executable, "-c", before + BAR], bars_allowed(**changes))
    assert (status, seen) == (0, "")


def test_nothing_is_written_to_a_file():
    done = subprocess.run(
        [sys.executable, "-c", BAR],
        env=bars_allowed(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("", "")


REHEARSAL = """
import logging
import time
from pathlib import Path
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as the command does
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.tools.rehearsal import steps
def train(rehearsal):
    for _ in range(12):
        time.sleep(0.1)
        rehearsal.refresh()
    return "trained"
def export(rehearsal):
    raise RecipeError("no export")
steps.STEPS = (("load, train", train), ("export", export), ("generate", export))
assert not steps.rehearse(Path("recipe.yaml"), "fsdp2_cpu")
"""


@pytest.mark.slow
def test_terminal_sees_the_step_of_a_rehearsal_and_the_elapsed_time():
    status, seen = on_a_terminal([sys.executable, "-c", REHEARSAL], bars_allowed())
    assert status == 0, seen
    assert {"00:00", "00:01"} <= set(re.findall(r"step 1/3, load, train \[(\d\d:\d\d)\]", seen)), seen
    assert "step 2/3, export" in seen


@pytest.mark.slow
def test_rehearsal_prints_every_step_without_a_terminal():
    done = subprocess.run(
        [sys.executable, "-c", REHEARSAL], env=bars_allowed(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ok     load, train  trained (1 s)",
        "FAILED export       no export",
        "-      generate",
    ]


def run_arguments(model, data, output, *more):
    return [
        "--model_name_or_path", model, "--dataset_name", data, "--output_dir", output, "--max_steps", "1",
        "--per_device_train_batch_size", "2", "--max_length", "64", "--report_to", "none", "--disable_tqdm", "true",
        "--gradient_checkpointing", "false", "--asynchronous_save", "false", "--verify_export", "off", *more,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("template", ["fsdp2_full_shard", "fsdp1_full_shard"])
def test_run_shows_loading_saving_and_exporting(template, tiny_model, text_file, tmp_path):
    command = [*LAUNCH, "--config_file", f"accelerate_configs/{template}.yaml", "--num_processes", "1"]
    command += ["--main_process_port", "0", "--mixed_precision", "no", "recipes/sft.py"]
    command += run_arguments(tiny_model("llama"), text_file, tmp_path / "out", "--save_steps", "1")
    status, seen = on_a_terminal([str(part) for part in command], bars_allowed(), timeout_seconds=120)
    assert status == 0, seen
    complete = r"100%\|[^|]*\| (\d+\.?\d*k)/\1 \["
    assert re.search(f"load weights: {complete}", seen), seen
    assert re.search(f"export weights: {complete}", seen), seen
    assert re.search(r"save model: +\d+%\|[^|]*\| +\S+k?/\S+k \[\d\d:\d\d<", seen), seen
    assert "save optimizer: " in seen
