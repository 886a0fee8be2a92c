"""The quickstart script, with a tiny model instead of the downloaded one."""

import subprocess
import sys

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
