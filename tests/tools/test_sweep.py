"""The sweep: every case has a result, even if it runs out of memory; the sweep writes one table, plots, and Slurm jobs."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import PlanError, TemplateError
from hf_fsdp_recipes.tools import subprocess_runner
from hf_fsdp_recipes.tools.sweep import cases, results, run_status, scaling_plots, sweep
from tests.recipes.launching import ROOT, environment

FULL, GRAD = "fsdp2_full_shard", "fsdp2_shard_grad_op"
SAMPLE = ROOT / "docs" / "sample_sweep"


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"model_name_or_path": "org/model", "dataset_name": "rows", "max_length": 64}))
    return file


def make_cases(recipe, directory, *, ranks=(1, 2), templates=(FULL, GRAD), num_steps=5, **changes):
    return cases.make_cases(recipe, ranks, templates, directory, num_steps, **changes)


def write_metrics(directory, num_ranks, *, step_seconds=2.0, steps=5, end=True, **changes):
    start = {
        "run": "a", "num_ranks": num_ranks, "device": "NVIDIA H200", "dtype": "bfloat16", "num_parameters": 7000,
        "batch_per_device": 4, "gradient_accumulation_steps": 2, "num_rows": 1000,
    }  # fmt: skip
    logged = [
        {
            "step": step, "loss": 1.0, "num_steps": 1, "step_seconds": 99.0 if step < 4 else step_seconds,
            "tokens_per_second": 100.0 * num_ranks, "tokens_per_second_per_device": 100.0, "mfu": 0.5,
            "host_bytes": [10**8] * num_ranks, "device_peak_bytes": [7 * 10**9] * num_ranks,
            "device_reserved_peak_bytes": [8 * 10**9 // num_ranks] * num_ranks, **({"is_warmup": True} if step < 4 else {}),
        }
        | changes
        for step in range(1, steps + 1)
    ]  # fmt: skip
    entries = [start, *logged, *([{"step": steps, "ended_at_step": steps}] if end else [])]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture
def swept(recipe, tmp_path):
    """Return the directory of a sweep of two templates over 1, 2 and 4 ranks; both run out of memory on one rank."""
    directory = tmp_path / "swept"
    wanted, _ = make_cases(recipe, directory, ranks=[1, 2, 4])
    for case in wanted:
        case.start_record()
        if case.num_ranks == 1:
            case.finish_record(run_status.OUT_OF_MEMORY, 0)
        else:
            write_metrics(case.directory, case.num_ranks, step_seconds=2.0 if case.template == FULL else 1.5)
            case.finish_record(run_status.FINISHED, 10**9)
    return directory


def rows(table):
    return [line.strip("| ").split(" | ") for line in table.read_text().splitlines() if line.startswith("| fsdp")]


def test_table_has_every_case_and_notes_what_was_extrapolated(swept):
    table = sweep.write_summary(swept)
    assert rows(table) == [
        [FULL, "1", "OOM", "–", "–", "–", "–", "–"],
        [
            FULL,
            "2",
            "4.00 GB",
            "0:02:06",
            "2 s",
            "200.0",
            "100.0",
            "50.0%",
        ],  # 63 steps of 16 rows, without the warm-up's 99 s
        [FULL, "4", "2.00 GB", "0:01:04", "2 s", "400.0", "100.0", "50.0%"],
        [GRAD, "1", "OOM", "–", "–", "–", "–", "–"],
        [GRAD, "2", "4.00 GB", "0:01:34", "1.5 s", "200.0", "100.0", "50.0%"],
        [GRAD, "4", "2.00 GB", "0:00:48", "1.5 s", "400.0", "100.0", "50.0%"],
    ]
    text = table.read_text()
    assert "extrapolated from the step time to all 1,000 sequences; no full epoch was run" in text
    assert "reserved by the device allocator" in text and "median of 2 steps after the warm-up" in text
    found = {(c["template"], c["num_ranks"]): c for c in json.loads((swept / "sweep.json").read_text())["cases"]}
    assert found[FULL, 1]["status"] == "OOM" and "step_seconds" not in found[FULL, 1]
    assert (found[FULL, 4]["epoch_steps"], found[FULL, 4]["epoch_seconds"]) == (32, 64.0)


def test_host_memory_is_shown_without_a_device(swept):
    for file in swept.glob("*/metrics.jsonl"):
        write_metrics(file.parent, 2, device_peak_bytes=[0, 0], device_reserved_peak_bytes=[0, 0])
    found = [result for result in results.read_results(swept) if result.status == run_status.FINISHED]
    assert {(result.peak_memory_bytes, result.memory_kind) for result in found} == {(10**9, "host")}


def test_stream_has_no_epoch_and_a_short_run_no_step_time(swept):
    for file in swept.glob("*/metrics.jsonl"):
        entries = [json.loads(line) for line in file.read_text().splitlines()]
        entries[0].pop("num_rows")
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    text = sweep.write_summary(swept).read_text()
    assert "Epoch: n/a (the dataset is streamed)." in text
    for file in swept.glob("*/metrics.jsonl"):
        file.write_text(file.read_text().replace('"step_seconds": 2.0', '"is_warmup": true').replace("1.5", "1.5e0"))
        file.write_text(re.sub(r'"mfu": 0.5, ', '"mfu": 0.5, "is_warmup": true, ', file.read_text()))
    assert "every case ended within its throughput_warmup_steps" in sweep.write_summary(swept).read_text()


def series(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}


def test_scaling_plots_show_a_line_per_template_and_where_memory_ran_out(swept):
    memory, epoch, step = scaling_plots.draw_scaling(results.read_results(swept)).axes
    titles = [axes.get_title(loc="left") for axes in (memory, epoch, step)]
    assert titles == ["Peak memory", "Epoch time, extrapolated", "Step time"]
    assert memory.get_ylabel() == "reserved device memory of the largest rank, GB"
    assert [axes.get_ylabel() for axes in (epoch, step)] == ["minutes per epoch", "seconds per step"]
    assert series(memory) == {FULL: [(2, 4.0), (4, 2.0)], GRAD: [(2, 4.0), (4, 2.0)]}
    assert series(epoch)[FULL] == [(2, pytest.approx(2.1)), (4, pytest.approx(64 / 60))]
    assert series(step)[GRAD] == [(2, 1.5), (4, 1.5)]
    for axes in (memory, epoch, step):
        marks = [(mark.get_text(), mark.get_position()[0]) for mark in axes.texts]
        assert marks == [("OOM", 1), ("OOM", 1)]
        assert len({mark.get_position()[1] for mark in axes.texts}) == 2  # one above the other, without overlap
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]


def test_strategies_are_compared_by_mfu_or_else_by_throughput(swept):
    found = results.read_results(swept)
    (axes,) = scaling_plots.draw_strategies(found).axes
    assert axes.get_ylabel() == "MFU, % of dense peak" and "4 ranks" in axes.get_title(loc="left")
    assert series(axes) == {FULL: [(2.0, 50.0)], GRAD: [(2.0, 50.0)]}
    found = [replace(result, mfu=None) for result in found]
    found[-1] = replace(found[-1], status="OOM", peak_memory_bytes=None)
    (axes,) = scaling_plots.draw_strategies(found).axes
    assert axes.get_ylabel() == "tokens/s, all ranks"
    assert series(axes) == {FULL: [(2.0, 400.0)], f"{GRAD}: OOM": []}


@pytest.mark.parametrize(("name", "width"), [(sweep.SCALING_PLOT, 1400), (sweep.STRATEGIES_PLOT, 800)])
def test_plot_is_a_png_that_shows_its_lines(name, width, swept):
    assert f"]({name})" in sweep.write_summary(swept).read_text()
    pixels = matplotlib.image.imread(swept / name)
    assert pixels.shape[0] > 400 and pixels.shape[1] > width
    rgb = (pixels[..., :3] * 255).round()
    for color in ((0x1F, 0x5A, 0x8C), (0xD9, 0x82, 0x2B), (255, 255, 255)):  # lines of both templates
        assert (rgb == color).all(axis=-1).any()


@pytest.mark.parametrize(
    ("log", "run_exit", "found"),
    [
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", run_status.RunExit(1), "OOM"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", run_status.RunExit(1), "OOM"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", None, "OOM"),
        ("  exitcode  : -9 (pid: 7)", run_status.RunExit(1, kernel_killed=True), "OOM"),
        ("  exitcode  : -9 (pid: 7)", run_status.RunExit(1), "failed: a rank was killed (SIGKILL)"),
        ("", run_status.RunExit(1, kernel_killed=True), "failed: exit status 1"),  # the kernel killed an unrelated process
        ("", run_status.RunExit(-9, timed_out=True), "failed: exceeded its time limit"),
        ("[rank0]: ValueError: no\nx.ChildFailedError: recipes/sft.py", run_status.RunExit(1), "failed: ValueError: no"),
        ("DataError: rows\nhas no column", None, "failed: DataError: rows"),
        ("step 3", None, "failed: 0 of 5 steps"),
        ("", None, "not run"),
    ],
)  # fmt: skip
def test_status_is_read_from_exit_and_log(log, run_exit, found, tmp_path):
    if log:
        (tmp_path / run_status.RANK_LOGS / "node0").mkdir(parents=True)
        name = run_status.LOG_FILE if run_exit else f"{run_status.RANK_LOGS}/node0/stderr.log"
        (tmp_path / name).write_text(log + "\n")
    assert run_status.find_status(tmp_path, 5, run_exit).startswith(found)


def test_run_that_took_all_its_steps_has_finished(tmp_path):
    write_metrics(tmp_path, 2)
    assert run_status.find_status(tmp_path, 5) == "finished"
    assert run_status.find_status(tmp_path, 6) != "finished"
    write_metrics(tmp_path, 2, steps=3, end=False)
    assert (
        run_status.find_status(tmp_path, 5) == "failed: 3 of 5 steps and no error in its log; it may still be running"
    )


def follow(code, tmp_path, limit_seconds=30.0):
    with subprocess_runner.start([sys.executable, "-c", code], os.environ, tmp_path / run_status.LOG_FILE) as run:
        return sweep.follow(run, limit_seconds, lambda: None), run.read_log()


@pytest.mark.launch
def test_real_out_of_memory_error_is_recognized(tmp_path):
    code = "import torch; torch.empty(10**16)"
    run_exit, _ = follow(code, tmp_path)
    assert run_exit.status == 1 and run_status.find_status(tmp_path, 5, run_exit) == "OOM"


@pytest.mark.launch
def test_peak_of_the_largest_process_is_sampled(tmp_path):
    code = "import time; held = bytearray(300_000_000); held[::4096] = b'x' * len(held[::4096]); time.sleep(2.5)"
    run_exit, _ = follow(code, tmp_path)
    assert 3e8 < run_exit.host_peak_bytes < 4e8


ORPHAN = """
import subprocess, sys, time
sleeper = "[sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True"
inner = f"import subprocess, sys; print(subprocess.Popen({{sleeper}}).pid, flush=True)"
subprocess.run([sys.executable, "-c", inner], check=True)
time.sleep({seconds})
"""


@pytest.mark.launch
@pytest.mark.parametrize("seconds", [0, 300])
def test_no_process_survives_not_even_an_orphan(seconds, tmp_path):
    run_exit, log = follow(ORPHAN.format(seconds=seconds), tmp_path, limit_seconds=3 if seconds else 30)
    assert run_exit.timed_out == bool(seconds)
    assert not psutil.pid_exists(int(log))


@pytest.mark.launch
def test_sigterm_ends_the_ranks_too(tmp_path):
    log = tmp_path / "log.txt"
    command = f"[sys.executable, '-c', {ORPHAN.format(seconds=300)!r}], os.environ, Path({str(log)!r})"
    code = "import os, sys; from pathlib import Path; from hf_fsdp_recipes.tools import subprocess_runner\n"
    code += f"with subprocess_runner.start({command}) as run: list(run.poll(300))"
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment(), cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (log.is_file() and log.read_text().strip()):
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.1)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        parent.kill()
        parent.wait()
    assert not psutil.pid_exists(int(log.read_text()))


def test_case_is_rendered_for_its_ranks_and_for_cpu(recipe, tmp_path):
    (case,), _ = make_cases(recipe, tmp_path / "out", ranks=[2], templates=["fsdp1_full_shard_gaudi"])
    config = case.settings["config"]
    assert (config["num_processes"], config["use_cpu"], config["mixed_precision"]) == (2, True, "no")
    assert "dynamo_config" not in config
    arguments = dict(zip(case.arguments[::2], case.arguments[1::2], strict=True))
    assert arguments["--max_steps"] == "5" and arguments["--export"] == "false" and arguments["--use_cpu"] == "true"


def test_result_is_kept_while_the_settings_are_the_same(recipe, swept):
    def known(**changes):
        wanted, _ = make_cases(recipe, swept, **({"ranks": [1, 2, 4]} | changes))
        return [sweep.find_result(case) for case in wanted]

    assert known() == ["OOM", "finished", "finished"] * 2
    assert known(num_steps=6) == known(overrides=["--max_length", "32"]) == [None] * 6
    recipe.write_text(recipe.read_text() + "seed: 3\n")
    assert known() == [None] * 6


def test_failed_case_is_repeated(recipe, tmp_path):
    (case, *_), _ = make_cases(recipe, tmp_path / "out")
    case.start_record()
    case.finish_record("failed: why", 0)
    assert sweep.find_result(case) is None


def test_impossible_sweep_is_refused_before_anything_runs(recipe, tmp_path):
    with pytest.raises(TemplateError, match="no template"):
        make_cases(recipe, tmp_path, templates=["fsdp3"])
    with pytest.raises(PlanError, match=r"keeps one replica per node.*--submit"):
        make_cases(recipe, tmp_path, templates=["fsdp2_hybrid_shard"])
    with pytest.raises(PlanError, match="neither a file nor a shipped recipe"):
        make_cases(tmp_path / "none.yaml", tmp_path)
    with pytest.raises(PlanError, match="Separate them with commas"):
        CliRunner().invoke(app, ["sweep", str(recipe), "--ranks", "two"], catch_exceptions=False)
    with pytest.raises(PlanError, match="has no cases"):
        CliRunner().invoke(app, ["sweep", "--collect", str(tmp_path)], catch_exceptions=False)


def submitted(recipe, output, *more):
    command = [
        "sweep",
        str(recipe),
        "--ranks",
        "4,16",
        "--templates",
        f"{FULL},fsdp2_hybrid_shard",
        "--submit",
        "--steps",
        "5",
    ]
    result = CliRunner().invoke(app, [*command, "--output", str(output), *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_jobs_are_written_for_the_slurm_script(recipe, tmp_path):
    output = tmp_path / "a sweep"
    printed = submitted(recipe, output, "--max_length", "32")
    assert "skipped: fsdp2_hybrid_shard on 4 ranks: " in printed and "3 jobs" in printed
    lines = (output / "submit.sh").read_text().splitlines()
    assert lines[0] == "#!/bin/bash" and f"--collect {output}" in lines[1]
    small, large, hybrid = [shlex.split(line) for line in lines if " sbatch " in line]
    assert {"NPROC_PER_NODE=4", "--nodes=1", "--gpus-per-node=4"} <= set(small)
    assert {"NPROC_PER_NODE=8", "--nodes=2", "--gpus-per-node=8"} <= set(large)
    script = large.index(str(ROOT / "recipes" / "launch.slurm"))
    arguments = dict(zip(large[script + 1 :: 2], large[script + 2 :: 2], strict=True))
    assert arguments["--config"] == str(recipe) and arguments["--max_length"] == "32"
    assert arguments["--output_dir"] == str(output / f"{FULL}_16ranks") and "--use_cpu" not in arguments
    (template,) = [word.removeprefix("TEMPLATE=") for word in hybrid if word.startswith("TEMPLATE=")]
    config = yaml.safe_load(Path(template).read_text())
    assert (config["num_machines"], config["num_processes"], config["mixed_precision"]) == (2, 16, "bf16")


def test_jobs_are_collected_and_only_those_without_a_result_submitted_again(recipe, tmp_path):
    output = tmp_path / "out"
    submitted(recipe, output)
    write_metrics(output / f"{FULL}_16ranks", 16)
    (output / f"{FULL}_4ranks" / "slurm.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    result = CliRunner().invoke(app, ["sweep", "--collect", str(output)], catch_exceptions=False)
    assert result.exit_code == 0
    cells = {(row[0], row[1]): row[2] for row in rows(output / "sweep.md")}
    assert cells == {
        (FULL, "4"): "OOM",
        (FULL, "16 on 2 nodes"): "0.50 GB",
        ("fsdp2_hybrid_shard", "16 on 2 nodes"): "not run",
    }
    assert (output / sweep.SCALING_PLOT).is_file() and "not run" in result.output
    assert "1 job to submit" in submitted(recipe, output)


def test_committed_sample_is_what_the_command_writes(tmp_path):
    copy = tmp_path / "sample_sweep"
    shutil.copytree(SAMPLE, copy)
    table = sweep.write_summary(copy)
    assert table.read_text() == (SAMPLE / "sweep.md").read_text()
    assert (copy / "sweep.json").read_text() == (SAMPLE / "sweep.json").read_text()
    for name in (sweep.SCALING_PLOT, sweep.STRATEGIES_PLOT):
        assert matplotlib.image.imread(SAMPLE / name).shape == matplotlib.image.imread(copy / name).shape


@pytest.mark.slow
def test_tiny_model_is_swept_for_real_and_not_twice(tiny_model, text_file, tmp_path):
    recipe, output = tmp_path / "tiny.yaml", tmp_path / "out"
    settings = {"model_name_or_path": str(tiny_model("llama")), "dataset_name": str(text_file), "max_length": 64}
    recipe.write_text(yaml.safe_dump(settings | {"per_device_train_batch_size": 2, "gradient_checkpointing": False}))
    command = [
        sys.executable,
        "-c",
        "from hf_fsdp_recipes.cli import main; main()",
        "sweep",
        str(recipe),
        "--ranks",
        "1,2",
    ]
    command += ["--templates", f"{FULL},{GRAD}", "--output", str(output), "--steps", "5", "--warmup_steps", "0"]

    def swept_in():
        started = time.monotonic()
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""  # no terminal, no bars
        return done.stdout, time.monotonic() - started

    printed, _ = swept_in()
    assert [line for line in printed.splitlines() if ": finished" in line] == [
        f"{template} on {ranks}: finished" for template in (FULL, GRAD) for ranks in ("1 rank", "2 ranks")
    ]
    found = json.loads((output / "sweep.json").read_text())["cases"]
    assert [(one["template"], one["num_ranks"]) for one in found] == [(t, n) for t in (FULL, GRAD) for n in (1, 2)]
    for one in found:
        assert one["measured_steps"] == 2 and one["num_rows"] == 72
        assert one["epoch_steps"] == 72 // (2 * one["num_ranks"])
        assert 1e8 < one["peak_memory_bytes"] < 4e9
        assert not (output / f"{one['template']}_{one['num_ranks']}ranks" / "export").exists()
    again, seconds = swept_in()
    assert again.count("finished (earlier run)") == 4 and seconds < 60
