"""The quickstart script, with a tiny model instead of the downloaded one."""

import runpy
import subprocess
import sys

import pytest

from tests.recipes.launching import ROOT, environment


def test_quickstart_trains_is_killed_resumes_and_exports(tiny_model, tmp_path):
    output = tmp_path / "run"
    options = [
        "--model",
        str(tiny_model("llama_tied")),
        "--output_dir",
        str(output),
        "--max_steps",
        "12",
        "--save_steps",
        "4",
    ]
    command = [sys.executable, "recipes/quickstart.py", *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed (SIGKILL, launcher and both ranks) after step" in done.stdout
    assert "resuming from step" in done.stdout
    for number in range(1, 7):
        assert f"[{number}/6]" in done.stdout
    assert (output / "export" / "adapter_model.safetensors").is_file()
    assert (output / "export_merged" / "model.safetensors").is_file()
    assert "Before and after" in (output / "report.md").read_text()
    steps = [line.split("/")[0].split()[1] for line in done.stdout.splitlines() if line.startswith("  step")]
    assert steps[-1] == "12"


def test_only_an_earlier_quickstart_is_deleted(tmp_path):
    start_from_scratch = runpy.run_path(str(ROOT / "recipes" / "quickstart.py"))["start_from_scratch"]
    fresh, own, foreign = tmp_path / "fresh", tmp_path / "own", tmp_path / "foreign"
    start_from_scratch(own)
    (own / "old.txt").touch()
    foreign.mkdir()
    (foreign / "notes.txt").touch()
    start_from_scratch(fresh)
    start_from_scratch(own)
    assert sorted(file.name for file in own.iterdir()) == [".quickstart"]
    with pytest.raises(SystemExit, match="not an earlier quickstart"):
        start_from_scratch(foreign)
    assert (foreign / "notes.txt").is_file()
