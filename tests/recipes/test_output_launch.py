"""What a run prints besides its progress fits on a screen, and no deprecation is among it."""

import os
import re
import subprocess

import pytest

from tests.recipes.launching import LAUNCH, ROOT, kill_tree
from tests.recipes.small import small_arguments

# Losses of training and evaluation, and bars. A bar without a terminal is a line, too.
PROGRESS = re.compile(r"'(?:train_|eval_)?loss'|\d+/\d+ \[|examples/s\]")


@pytest.mark.parametrize(
    "recipe", ["qwen3_8b_lora", pytest.param("qwen3_8b_qlora", marks=pytest.mark.slow)]
)
def test_a_run_prints_fewer_than_15_lines_that_are_not_progress(recipe, tmp_path):
    arguments = small_arguments(ROOT / "recipes" / f"{recipe}.yaml", tmp_path)
    # As in a real run: with activation checkpointing, evaluation, bars and all warnings.
    fields = "--eval_strategy steps --eval_steps 2 --disable_tqdm false --dataloader_num_workers 1"
    command = [
        *[LAUNCH[0], "-m", "hf_fsdp_recipes.cli", "sft", "--accelerate_config", "cpu"],
        *["--main_process_port", "0", *arguments, *fields.split()],
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text, _ = process.communicate(timeout=150)
    finally:
        kill_tree(process)
    assert process.returncode == 0, text
    lines = text.replace("\x1b[A", "").split("\n")  # bars move the cursor up
    lines = [line for line in lines if line.strip() and not PROGRESS.search(line)]
    assert 3 <= len(lines) < 15, text  # the model, and two exports
    assert "deprecated" not in text
    [model] = [line for line in lines if "trains " in line]
    assert re.match(
        r"PeftModelForCausalLM: trains 32,768 of 1\d\d,\d\d\d parameters; FSDP units: ", model
    )
    assert "2 x FSDPQwen3DecoderLayer" in model
