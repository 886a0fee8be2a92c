"""A few kills of `make soak` lose nothing, and the counts are written."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from benchmarks import soak
from tests.ranks.harness import context


@pytest.mark.slow
def test_killed_runs_equal_the_uninterrupted_run(tmp_path):
    shared_memory = Path("/dev/shm")
    tmpfs = Path(tempfile.mkdtemp(dir=shared_memory if shared_memory.is_dir() else tmp_path))
    arguments = ["--kills", "4", "--disk", str(tmp_path / "disk"), "--tmpfs", str(tmpfs / "soak"), "--seed", "1"]
    process = context.Process(target=soak.main, args=(arguments,))
    try:
        process.start()
        process.join(280)
        assert process.exitcode == 0
        found = json.loads((tmp_path / "disk" / "soak.json").read_text())
        assert found["kills"] >= 4
        counts = ("unusable_resumes", "lost_steps", "different_results", "hangs")
        assert [found[count] for count in counts] == [0, 0, 0, 0]
    finally:
        process.kill()
        shutil.rmtree(tmpfs)
