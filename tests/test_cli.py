"""The command line's tables and errors."""

import subprocess
import sys

from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import CheckpointError
from tests.checkpointing.test_layout import make, tear_flipped, tear_truncated

run = CliRunner().invoke


def test_checkpoints_are_listed_with_their_faults(tmp_path):
    make(tmp_path, 5)
    tear_truncated(make(tmp_path, 10))
    output = run(app, ["checkpoints", str(tmp_path)]).output
    lines = output.splitlines()
    assert lines[0].split() == ["step", "size", "ranks", "loss", "state"]
    assert lines[1].split()[0] == "5" and lines[1].endswith("complete")
    assert lines[2].split()[0] == "10" and "a.bin has 1 bytes" in lines[2]


def test_verify_reads_every_checksum(tmp_path):
    tear_flipped(make(tmp_path, 5))
    assert "complete" in run(app, ["checkpoints", str(tmp_path)]).output
    result = run(app, ["checkpoints", str(tmp_path), "--verify"])
    assert "a.bin has changed" in result.output
    assert isinstance(result.exception, CheckpointError)


def test_error_is_one_line_on_stderr_and_status_1(tmp_path):
    code = "from hf_fsdp_recipes.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "checkpoints", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("CheckpointError: ")
    assert "Traceback" not in done.stderr
