"""The sweep: every case has a row, even if it fails or runs out of memory; it draws plots."""

import json
import subprocess
import sys

import matplotlib.image
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools import launch, sweep
from hf_fsdp_recipes.tools.files import find_file

FULL, GRAD = "full_shard", "shard_grad_op"


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


def write_log(case, text):
    case.mkdir(parents=True, exist_ok=True)
    (case / "log.txt").write_text(text)


def rows(text):
    return [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith(("| full", "| shard"))
    ]


def test_table_and_plot_have_every_case_also_those_that_failed(app, tmp_path):
    write_log(
        tmp_path / f"{FULL}_1ranks",
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    )
    write_metrics(tmp_path / f"{FULL}_2ranks")
    write_metrics(tmp_path / f"{FULL}_4ranks")
    write_log(
        tmp_path / f"{GRAD}_2ranks", "[rank0]: ValueError: no\nx.ChildFailedError: recipes/sft.py"
    )
    write_metrics(tmp_path / f"{GRAD}_4ranks", seconds=1.5, device_reserved_peak_bytes=[0] * 4)
    write_metrics(tmp_path / f"{GRAD}_8ranks", steps=3)  # was stopped by a signal
    printed = invoke(app, "--output_dir", tmp_path)
    assert rows(printed) == [
        [FULL, "1", *"------", "OOM"],
        # 63 steps of 16 rows, without the warm-up's 99 s
        [FULL, "2", "4.00", "126", "2", "200", "100", "50.0%", "finished"],
        [FULL, "4", "2.00", "64", "2", "400", "100", "50.0%", "finished"],
        [GRAD, "2", *"------", "failed: ValueError: no"],
        # host memory, without a device's
        [GRAD, "4", "0.10", "48", "1.5", "400", "100", "50.0%", "finished"],
        [GRAD, "8", *"------", "failed: 3 of 5 steps; it may still be running"],
    ]
    assert matplotlib.image.imread(tmp_path / "sweep.png").shape[1] > 800
    results = [
        sweep.read_result(tmp_path / f"{name}ranks")
        for name in (f"{FULL}_1", f"{FULL}_2", f"{FULL}_4", f"{GRAD}_4")
    ]
    memory, *_, mfu = sweep.draw(results).axes
    lines = {
        line.get_label(): list(zip(*line.get_data(), strict=True)) for line in memory.get_lines()
    }
    assert lines == {f"{FULL}, OOM on 1": [(2, 4.0), (4, 2.0)], GRAD: [(4, 0.1)]}
    assert mfu.get_title(loc="left") == "MFU"


LOGS = {
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": "OOM",
    "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried": "OOM",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.": "OOM",
    "  exitcode  : -9 (pid: 7)": "failed: a rank was killed (SIGKILL)",
    "RecipeError: rows\n[rank1]: RuntimeError: Connection closed by peer": (
        "failed: RecipeError: rows"
    ),
    "step 3": "failed: 0 of 0 steps",
    "": "not run",
}


@pytest.mark.parametrize("log", LOGS)
def test_status_says_why_a_case_failed(log, tmp_path):
    if log:
        write_log(tmp_path / "logs" / "node0", log)
    assert sweep.find_status(tmp_path).startswith(LOGS[log])


def test_a_stream_has_no_epoch_and_a_run_within_its_warm_up_no_times(tmp_path):
    write_metrics(tmp_path / f"{FULL}_2ranks", num_steps=1)
    file = tmp_path / f"{FULL}_2ranks" / "metrics.jsonl"
    file.write_text(file.read_text().replace(', "num_rows": 1000', ""))
    measured = sweep.read_result(file.parent).measured
    assert "epoch_seconds" not in measured and measured["step_seconds"] == 2.0
    write_metrics(file.parent, is_warmup=True)
    result = sweep.read_result(file.parent)
    assert result.status == "finished" and result.measured["gigabytes"] == 4.0
    assert result.measured.keys().isdisjoint({"step_seconds", "epoch_seconds", "mfu"})


def test_a_repeated_case_replaces_what_a_kill_left(app, tmp_path, monkeypatch):
    launched = []

    def run_recipe(template, arguments, log, on_cpu):
        case = log.parent
        launched.append(case.name)
        assert not (case / "metrics.jsonl").exists()
        assert f"--num_processes={case.name[-6]}" in arguments
        assert {"--learning_rate", "--num_machines"} <= {*arguments}
        log.write_text("CUDA out of memory" if case.name[-6] == "1" else "step 5")
        if case.name[-6] != "1":
            write_metrics(case)

    monkeypatch.setattr(sweep, "run_recipe", run_recipe)
    arguments = ["--accelerate_config", FULL, "--num_processes", 2, "--num_processes", 1]
    arguments += ["--output_dir", tmp_path, "--config", "mine.yaml", "--learning_rate", "1e-4"]
    invoke(app, *arguments)
    assert launched == [f"{FULL}_1ranks", f"{FULL}_2ranks"]
    metrics = tmp_path / f"{FULL}_2ranks" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:40])
    assert rows(invoke(app, "--output_dir", tmp_path))[1][-1].startswith("failed")
    assert [row[-1] for row in rows(invoke(app, *arguments))] == ["OOM", "finished"]


def test_a_sweep_without_cases_is_refused(app, tmp_path):
    with pytest.raises(ToolError, match="Pass both"):
        invoke(app, "--output_dir", tmp_path, "--accelerate_config", FULL)
    with pytest.raises(ToolError, match="holds no case"):
        invoke(app, "--output_dir", tmp_path)


@pytest.mark.launch
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
    assert [row[1] for row in rows(done.stdout)] == ["1", "2"]
    assert "OOM" not in done.stdout and "failed" not in done.stdout


def test_a_case_that_was_continued_is_not_finished_before_its_new_end(tmp_path):
    case = tmp_path / f"{FULL}_2ranks"
    write_metrics(case)
    assert sweep.find_status(case) == "finished"
    lines = (case / "metrics.jsonl").read_text().splitlines()
    longer = {**json.loads(lines[0]), "from_step": 5, "max_steps": 9}
    (case / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(longer)]) + "\n")
    assert sweep.find_status(case) == "failed: 5 of 9 steps; it may still be running"
