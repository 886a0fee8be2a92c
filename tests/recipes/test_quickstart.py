"""The quickstart script, with a tiny model instead of the downloaded one."""

import importlib.util
import json
import runpy
import subprocess
import sys

import pytest

from tests.recipes.launching import ROOT, environment


@pytest.mark.rehearsal
def test_quickstart_trains_is_killed_resumes_and_exports(tiny_model, tmp_path):
    output = tmp_path / "run"
    options = [
        "--model",
        str(tiny_model("llama_tied")),
        "--output_dir",
        str(output),
        "--max_steps",
        "36",
        "--save_steps",
        "12",
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
    assert "questions in the training set: 0 of 3 answers state the fact; before training, 0 did" in done.stdout
    title, picture = (output / "report.md").read_text().split("\n\n")[:2]
    assert title.startswith("# ") and picture.endswith("(quickstart.png)")
    assert (output / "quickstart.png").is_file()
    assert "Before and after" in (output / "report.md").read_text()
    assert "kernels" not in done.stdout + done.stderr and "Warning" not in done.stdout + done.stderr
    steps = [line.split("/")[0].split()[1] for line in done.stdout.splitlines() if line.startswith("  step")]
    assert steps[-1] == "36"


def test_each_fact_is_in_the_training_set_and_its_rewording_is_not():
    script = runpy.run_path(str(ROOT / "recipes" / "quickstart.py"))
    rows = [json.loads(line)["messages"] for line in (ROOT / "recipes" / "data" / "quickstart.jsonl").open()]
    answers = {question["content"]: answer["content"] for question, answer in rows}
    assert len(answers) == len(rows) == 24 and len(set(answers.values())) == 6
    for fact in script["FACTS"]:
        assert [other.is_stated(answers[fact.question]) for other in script["FACTS"]].count(True) == 1
        assert fact.is_stated(answers[fact.question])
        assert fact.held_out not in answers


def test_picture_has_the_loss_of_both_runs_and_the_memory_of_each_rank():
    draw = runpy.run_path(str(ROOT / "recipes" / "quickstart_picture.py"))["draw_picture"]
    starts = [{"from_step": step, "num_ranks": 2, "num_parameters": 10**8} for step in (0, 4)]
    steps = [{"step": step, "loss": 5.0 - step} for step in (1, 2, 3, 4)]
    memory = {"host_before_bytes": 0, "host_after_bytes": 2e8, "host_peak_bytes": 3e8}
    stages = [{"stage": "read into shards", "rank": rank} | memory for rank in (0, 1)]
    figure = draw(
        [*stages, starts[0], *steps, *stages, starts[1], {"step": 5, "loss": 0.5}], [{"step": 5, "loss": 0.5}]
    )
    loss, loading = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in loss.get_lines()}
    assert lines["before the kill"] == [4, 3, 2, 1] and lines["resumed"] == [1, 0.5]
    assert lines["lost in the kill, repeated"] == [0.5]
    assert [bar.get_height() for bar in loading.patches] == [300, 300, 200, 200]


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
    (own / "previous-1").mkdir()
    with pytest.raises(SystemExit, match="runs of your own"):
        start_from_scratch(own)


def test_missing_extra_is_one_sentence(monkeypatch, tmp_path):
    download = runpy.run_path(str(ROOT / "recipes" / "quickstart_model.py"))["download"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^gguf is not installed. Run: pip install 'gguf>=0.17'$"):
        download(tmp_path)
