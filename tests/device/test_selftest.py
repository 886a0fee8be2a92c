"""The programs that measure accelerators run on the emulated one; their checks count, but their figures mean nothing."""

import json
import subprocess
import sys

import pytest

from tests.device.ranks import device_environment
from tests.recipes.launching import ROOT, environment
from tests.tools.test_selftest import checks, selftest


def variables(package):
    return device_environment(package) | {"EMU_DEVICES": "2", "ACCELERATE_USE_CPU": "false"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_checks_pass_on_two_devices(package, tmp_path):
    done = selftest(tmp_path, "--minutes", "9", **variables(package))
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert set(checks(tmp_path / "report.md").values()) == {"yes"}
    assert "ranks: 2; Emulated (npu)" in report
    assert "device to pinned memory, GB/s" in report


def gpu_day(package, directory, *names):
    """Run measurements with tiny models; return their results by name."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--scale", "small", "--only", *names]
    command += ["--out", str(directory), "--models", str(directory / "models")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**variables(package)),
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    return {result["name"]: result for result in results}


def test_gpu_day_measures_a_save(package, tmp_path):
    results = gpu_day(package, tmp_path, "save_20gb")
    assert results["save_20gb"]["status"] == "ok", results
    assert results["save_20gb"]["figures"]["the checkpoint is the state at the save, bit for bit"] is True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gpu_day_compares_with_other_loaders_and_with_the_planner(package, tmp_path):
    names = ["load_16gb", "4bit", "lora_8b"]
    results = gpu_day(package, tmp_path, *names)
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(names, "ok")
    trained = results["lora_8b"]["figures"]
    assert trained["planned peak, GiB"] == pytest.approx(trained["peak allocated, GiB"], rel=0.3)
    assert trained["the report's clock, seconds"] == pytest.approx(trained["wall, seconds"], rel=0.1)
    assert (tmp_path / "traces" / "lora_8b.json.gz").exists()
