"""The quickstart script, with a tiny model instead of the downloaded one."""

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.rehearsal
def test_quickstart_trains_is_killed_resumes_and_exports(tiny_model, tmp_path):
    options = [
        "--model",
        tiny_model("llama_tied"),
        "--output_dir",
        "run",
        "--max_steps",
        "16",
        "--save_steps",
        "4",
    ]
    command = [sys.executable, str(RECIPES / "quickstart.py"), *map(str, options)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed with SIGKILL" in done.stdout and "with equal losses" in done.stdout
    assert all(f"[{number}/6]" in done.stdout for number in range(1, 7))
    assert "Warning" not in done.stdout + done.stderr
    assert (tmp_path / "run" / "export" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run" / "export_merged" / "model.safetensors").is_file()
    assert "## Before and after" in (tmp_path / "run" / "report.md").read_text()


def test_each_fact_is_in_the_training_set_and_its_rewording_is_not():
    facts = runpy.run_path(str(RECIPES / "quickstart.py"))["FACTS"]
    rows = [json.loads(line)["messages"] for line in (RECIPES / "data" / "quickstart.jsonl").open()]
    answers = {question["content"]: answer["content"] for question, answer in rows}
    for (question, reworded), words in facts.items():
        assert [other in answers[question] for other in facts.values()].count(
            True
        ) == 1 and words in answers[question]
        assert reworded not in answers


def test_only_an_earlier_quickstart_is_deleted(tmp_path):
    start_from_scratch = runpy.run_path(str(RECIPES / "quickstart.py"))["start_from_scratch"]
    own, other = tmp_path / "own", tmp_path / "other"
    start_from_scratch(own)
    (own / "old.txt").touch()
    start_from_scratch(own)
    assert [file.name for file in own.iterdir()] == [".quickstart"]
    other.mkdir()
    with pytest.raises(SystemExit, match="not an earlier quickstart"):
        start_from_scratch(other)


def test_a_missing_extra_is_one_sentence(monkeypatch, tmp_path):
    download = runpy.run_path(str(RECIPES / "quickstart_model.py"))["download"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SystemExit, match=r"^gguf, .* is not installed. Run: pip install 'gguf>=0.17'$"
    ):
        download(tmp_path)
