"""A rank that crashes ends the launcher soon, whatever the other ranks do."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hf_fsdp_recipes.tools.launch import kill_tree
from tests.ranks.harness import FSDP2, free_port, fsdp_environment
from tests.saving.runs import steps_in, wait_for

ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("exception", "in C"),
        pytest.param("exit", "in Python", marks=SLOW),
        pytest.param("exception", "in a collective", marks=SLOW),
    ],
)
def test_when_a_rank_crashes_the_launcher_ends_within_ten_seconds(tmp_path, how, where):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    command += ["-m", "tests.saving.crashing", str(tmp_path / "run"), how, where]
    environment = os.environ | fsdp_environment(FSDP2) | {"OMP_NUM_THREADS": "1"}
    launcher = psutil.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / "run-crashes")
        assert launcher.wait(timeout=10) == 1
    finally:
        kill_tree(launcher)
    assert steps_in(tmp_path / "run") in ([2], [2, 4])
