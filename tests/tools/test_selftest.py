"""The self-test: one report whose checks fail when a checkpoint or a resumed run is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.tools.selftest import measurements
from hf_fsdp_recipes.tools.selftest.measurements import Result, Site, measure, write_report
from tests.recipes.launching import ROOT, environment


def selftest(directory: Path, *options: str, **variables: str) -> subprocess.CompletedProcess:
    """Run the command in its own process; the report is report.md in the directory."""
    program = "from hf_fsdp_recipes.cli import main; main()"
    command = [sys.executable, "-c", program, "selftest", "--output", str(directory / "report.md"), *options]
    return subprocess.run(
        command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=560, check=False
    )


def checks(report: Path) -> dict[str, str]:
    """Return the yes-or-no figures of a report."""
    return dict(re.findall(r"^\| \| (.+) \| (yes|\*\*NO\*\*) \|$", report.read_text(), flags=re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cpu_ranks_pass_all_checks(tmp_path):
    done = selftest(tmp_path, "--minutes", "9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(checks(tmp_path / "report.md").values()) == {"yes"}
    assert len(checks(tmp_path / "report.md")) == 4
    text = (tmp_path / "report.md").read_text()
    assert "the figures say nothing about accelerators" in text
    assert "skipped" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]  # models and checkpoints are deleted


def test_what_would_end_too_late_is_skipped_and_said(tmp_path):
    done = CliRunner().invoke(app, ["selftest", "--output", str(tmp_path / "report.md"), "--minutes", "0.1"])
    assert done.exit_code == 0
    assert done.output.count("skipped") == len(measurements.MEASUREMENTS)
    assert "Raise --minutes." in (tmp_path / "report.md").read_text()


def test_failed_check_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "MEASUREMENTS", {"save": (1, lambda site: {"bit for bit": False, "GB/s": 0.0})})
    done = CliRunner().invoke(app, ["selftest", "--output", str(tmp_path / "report.md")])
    assert isinstance(done.exception, RecipeError)
    assert checks(tmp_path / "report.md") == {"bit for bit": "**NO**"}


def test_error_is_part_of_the_report_and_zero_is_not_a_failed_check(tmp_path):
    def fail(site):
        raise RecipeError("rank 1 is out of memory\n\nlast lines of the log")

    results = [measure("load", fail, Site(tmp_path)), measure("copies", lambda site: {"GB/s": 0.0}, Site(tmp_path))]
    assert [result.status for result in results] == ["failed", "ok"]
    write_report(tmp_path / "report.md", "title", None, 2, results)
    assert "last lines of the log" in (tmp_path / "report.md").read_text()


def test_wheel_without_recipes_says_what_is_missing(tmp_path):
    site = Site(tmp_path, script=tmp_path / "sft.py")
    result = measure("train, kill, resume", measurements.train_kill_resume, site)
    assert (result.status, "does not exist" in result.error) == ("failed", True)


def test_gpu_day_goes_on_where_it_ended(tmp_path, capsys, monkeypatch):
    from benchmarks import gpu_day

    done = Result("copies", "ok", 1.0, {"pinned memory to device, GB/s": 50.0})
    lines = [json.dumps(vars(done)), json.dumps(vars(Result("load_16gb", "failed"))), '{"name": "cut o']
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    run = []
    monkeypatch.setattr(
        gpu_day, "run_in_process", lambda options, name, deadline: run.append(name) or Result(name, "ok")
    )
    arguments = ["--out", str(tmp_path), "--models", str(tmp_path / "m"), "--scale", "small", "--only", "copies"]
    for minutes in ("1", "4"):  # a measurement with --scale small is expected to take one
        monkeypatch.setattr(sys, "argv", ["gpu_day.py", *arguments, "load_16gb", "4bit", "--minutes", minutes])
        gpu_day.main()
        assert ("left: 4bit;" in capsys.readouterr().out) == (minutes == "1")
    assert run == ["4bit"]
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", *arguments, "--again", "copies"])
    gpu_day.main()
    assert run == ["4bit", "copies"]
    assert gpu_day.read_results(tmp_path).keys() == {"copies", "load_16gb", "4bit"}
    assert "| 4bit | ok |" in (tmp_path / "report.md").read_text()
