"""The sweep: every case has a row, even if it fails or runs out of memory; it draws plots."""

import json
import math
import os
import subprocess
import sys

import matplotlib.image
import psutil
import pytest
import yaml
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from typer.testing import CliRunner

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools import launch, sweep
from hf_fsdp_recipes.tools.files import find_file

FULL, GRAD = "full_shard", "shard_grad_op"
ENDED = "{'train_runtime': '9.5'}\n"


@pytest.fixture
def app():
    import typer

    app = typer.Typer()
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        sweep.sweep
    )
    return app


def invoke(app, *arguments):
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def write_metrics(case, *, seconds=2.0, steps=5, max_steps=5, **changes):
    num_ranks = int(case.name.removesuffix("ranks").rpartition("_")[2])
    start = {
        "run": "a",
        "num_ranks": num_ranks,
        "max_steps": max_steps,
        "batch_per_device": 4,
        "gradient_accumulation_steps": 2,
        "num_rows": 1000,
    }
    logged = [
        {
            "step": step,
            "loss": 1.0,
            "num_steps": 1,
            "step_seconds": 99.0 if step < 4 else seconds,
            "mfu": 0.5,
            "tokens_per_second": 100.0 * num_ranks,
            "tokens_per_second_per_device": 100.0,
            "host_bytes": [10**8] * num_ranks,
            "device_peak_bytes": [0] * num_ranks,
            "device_valley_bytes": [0] * num_ranks,
            "device_reserved_peak_bytes": [8 * 10**9 // num_ranks] * num_ranks,
            **({"is_warmup": True} if step < 4 else {}),
        }
        | changes
        for step in range(1, steps + 1)
    ]
    case.mkdir(parents=True, exist_ok=True)
    entries = [start, *logged, {"step": steps, "ended_at_step": steps}]
    (case / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    write_log(case, ENDED)


def write_log(case, text):
    case.mkdir(parents=True, exist_ok=True)
    (case / "launch.log").write_text(text)


def rows(text):
    return [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith(("| small", "| large", "| tiny"))
    ]


def test_table_and_plot_have_every_case_of_two_recipes_also_those_that_failed(app, tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    oom = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    write_log(large / f"{FULL}_1ranks", oom)
    write_metrics(large / f"{FULL}_2ranks")
    write_metrics(large / f"{FULL}_8ranks")
    write_log(large / f"{FULL}_4ranks", oom)
    write_log(small / f"{GRAD}_2ranks", "[rank0]: ValueError: no\nx.ChildFailedError: sft.py")
    write_metrics(small / f"{GRAD}_4ranks", seconds=1.5, device_reserved_peak_bytes=[0] * 4)
    write_metrics(small / f"{GRAD}_8ranks", steps=3)
    write_log(small / f"{GRAD}_8ranks", f"{ENDED}stopped by a signal; resume from x")
    printed = invoke(app, "--output_dir", tmp_path)
    assert rows(printed) == [
        ["large", FULL, "1", *"------", "OOM"],
        # 63 steps of 16 rows, without the warm-up's 99 s
        ["large", FULL, "2", "4.00", "126", "2", "200", "100", "50.0%", "finished"],
        ["large", FULL, "4", *"------", "OOM"],
        ["large", FULL, "8", "1.00", "32", "2", "800", "100", "50.0%", "finished"],
        ["small", GRAD, "2", *"------", "failed: ValueError: no"],
        # host memory, without a device's
        ["small", GRAD, "4", "0.10", "48", "1.5", "400", "100", "50.0%", "finished"],
        ["small", GRAD, "8", *"------", "failed: no error in its log; it may still be running"],
    ]
    assert matplotlib.image.imread(tmp_path / "sweep.png").shape[1] > 800
    figure = sweep.draw(sorted(map(sweep.read_result, tmp_path.glob("*/*ranks"))))
    memory, *_, mfu = figure.axes
    lines = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in memory.lines}
    assert lines == {
        f"large | {FULL}": pytest.approx({1: math.nan, 2: 4.0, 4: math.nan, 8: 1.0}, nan_ok=True),
        f"small | {GRAD}": pytest.approx({2: math.nan, 4: 0.1, 8: math.nan}, nan_ok=True),
    }
    # At the number of ranks, in the line's color.
    assert [(text.get_position(), text.get_text().strip()) for text in memory.texts] == [
        ((1, 0), "OOM"),
        ((4, 0), "OOM"),
    ]
    assert {text.get_color() for text in memory.texts} == {memory.lines[0].get_color()}
    assert mfu.get_title(loc="left") == "MFU"


def test_no_text_or_legend_of_the_plot_covers_another_one(tmp_path):
    for recipe in ("large", "medium"):
        for template in (FULL, GRAD):
            write_metrics(tmp_path / recipe / f"{template}_8ranks")
            for ranks in (1, 2):
                write_log(tmp_path / recipe / f"{template}_{ranks}ranks", "CUDA out of memory")
    figure = sweep.draw(sorted(map(sweep.read_result, tmp_path.glob("*/*ranks"))))
    figure.draw_without_rendering()
    shown = [*figure.legends]
    for axes in figure.axes:
        shown += [axes.patch, axes.xaxis.label, *axes.texts, *axes.get_xticklabels()]
    boxes = []
    for artist in shown:
        box = artist.get_window_extent()
        if isinstance(artist, Text):  # its last line; the lines before it are empty
            box = Bbox.from_bounds(box.x0, box.y0, box.width, artist.get_fontsize())
        assert box.count_overlaps(boxes) == 0, artist
        boxes.append(box)


LOGS = {
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": "OOM",
    "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried": "OOM",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.": "OOM",
    "  exitcode  : -9 (pid: 7)": "OOM",
    "RecipeError: rows\n[rank1]: RuntimeError: Connection closed by peer": (
        "failed: RecipeError: rows"
    ),
    "step 3": "failed: no error in its log; it may still be running",
    ENDED: "finished",
}


@pytest.mark.parametrize("log", LOGS)
def test_status_says_why_a_case_failed(log, tmp_path):
    write_log(tmp_path / "logs" / "7" / "run0", log)
    assert sweep.find_status(tmp_path).startswith(LOGS[log])


def test_a_stream_has_no_epoch_and_a_run_within_its_warm_up_no_times(tmp_path):
    write_metrics(tmp_path / f"{FULL}_2ranks", num_steps=1)
    file = tmp_path / f"{FULL}_2ranks" / "metrics.jsonl"
    file.write_text(file.read_text().replace(', "num_rows": 1000', ""))
    measured = sweep.read_result(file.parent).measured
    assert "epoch_seconds" not in measured and measured["step_seconds"] == 2.0
    write_metrics(file.parent, is_warmup=True)
    result = sweep.read_result(file.parent)
    assert result.status == "finished" and result.measured["device_reserved_peak_bytes"] == 4.0
    assert result.measured.keys().isdisjoint({"step_seconds", "epoch_seconds", "mfu"})


def test_all_cases_of_the_command_run_with_their_recipe_template_and_ranks(
    app, tmp_path, monkeypatch
):
    launched = []

    def run_recipe(template, arguments, log):
        launched.append(str(log.relative_to(tmp_path).parent))
        assert f"--num_processes={log.parent.name[-6]}" in arguments
        assert f"--config={log.parent.parent.name}.yaml" in [
            argument.replace(f"{tmp_path}/", "") for argument in arguments
        ]
        assert {"--learning_rate", "--num_machines"} <= {*arguments}
        write_metrics(log.parent)

    monkeypatch.setattr(sweep, "run_recipe", run_recipe)
    arguments = ["--accelerate_config", FULL, "--num_processes", 2, "--num_processes", 1]
    for recipe in ("small", "large"):
        (tmp_path / f"{recipe}.yaml").write_text("output_dir: x\n")
        arguments += ["--config", tmp_path / f"{recipe}.yaml"]
    printed = invoke(app, *arguments, "--output_dir", tmp_path, "--learning_rate", "1e-4")
    cases = [f"{recipe}/{FULL}_{ranks}ranks" for recipe in ("small", "large") for ranks in (2, 1)]
    assert launched == cases
    assert [row[-1] for row in rows(printed)] == ["finished"] * 4


def test_only_the_newest_start_of_a_case_counts(tmp_path):
    """A case that is submitted again, and ends before its first step, keeps the old files."""
    case = tmp_path / "small" / f"{FULL}_2ranks"
    write_metrics(case)
    (case / "slurm.log").write_text("CUDA out of memory")
    starts = {
        "7/run0": ("CUDA out of memory", "OOM"),
        "8/run0": ("RecipeError: rows", "failed: RecipeError: rows"),
        "8/run1": ("", "failed: no error in its log; it may still be running"),
        "9/run0": (ENDED, "finished"),
        "10/run0": ("ToolError: 2 ranks need", "failed: ToolError: 2 ranks need"),
    }
    assert sweep.read_result(case).measured
    for number, (name, (text, status)) in enumerate(starts.items()):
        write_log(case / "logs" / name, text)
        later = (case / "launch.log").stat().st_mtime + 1 + number
        os.utime(case / "logs" / name / "launch.log", (later, later))
        result = sweep.read_result(case)
        assert result.status == status
        assert bool(result.measured) == (status == "finished")


def test_a_sweep_without_cases_is_refused(app, tmp_path):
    with pytest.raises(ToolError, match="holds no case"):
        invoke(app, "--output_dir", tmp_path)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--config a/r.yaml --num_processes 2", "a case needs"),
        ("--config a/r.yaml --config b/r.yaml --accelerate_config cpu --num_processes 2", "same"),
    ],
)
def test_cases_that_are_incomplete_or_would_share_a_directory_are_refused(
    arguments, says, app, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "r.yaml").write_text("output_dir: runs\n")
    with pytest.raises(ToolError, match=says):
        invoke(app, "--output_dir", "out", *arguments.split())


def test_no_rank_survives_a_run_that_is_stopped_and_no_earlier_output(tmp_path):
    before = psutil.Process().children(recursive=True)  # other tests' fork server, for example
    members = []

    def have_started():
        members[:] = [one for one in psutil.Process().children(recursive=True) if one not in before]
        return len(members) >= 3  # the launcher and two ranks

    template = find_file("template", "cpu")
    log = tmp_path / "log.txt"
    log.write_text("CUDA out of memory")
    assert launch.run_recipe(template, [], log, have_started, 120) is None
    assert "CUDA out of memory" not in log.read_text()
    assert not [one for one in members if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_tiny_model_is_swept_for_real(tiny_model, text_file, tmp_path):
    recipe, output = tmp_path / "tiny.yaml", tmp_path / "out"
    settings = {
        "model_name_or_path": str(tiny_model("llama")),
        "dataset_name": str(text_file),
        "max_length": 64,
    }
    recipe.write_text(
        yaml.safe_dump(settings | {"output_dir": "runs/tiny", "per_device_train_batch_size": 2})
    )
    arguments = ["sweep", "--config", str(recipe), "--accelerate_config", FULL]
    arguments += ["--num_processes", "1", "--num_processes", "2"]
    arguments += ["--output_dir", str(output), "--max_steps", "5"]
    start = [sys.executable, "-m", "hf_fsdp_recipes.cli"]
    done = subprocess.run(
        [*start, *arguments], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[2] for row in rows(done.stdout)] == ["1", "2"]
    assert "OOM" not in done.stdout and "failed" not in done.stdout
