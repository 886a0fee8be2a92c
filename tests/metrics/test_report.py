"""The report: tables and plots of measurements."""

import json
import shutil
from pathlib import Path

import matplotlib.image
import pytest
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.metrics import metrics_file, plots, report
from hf_fsdp_recipes.metrics.clock import PHASES

START = {
    "run": "fsdp_training_20250209-1430_tiny_1_2_1_4", "model": "org/tiny", "from_step": 0, "max_steps": 40, "num_ranks": 2,
    "device": "NVIDIA H200", "dtype": "bfloat16", "num_parameters": 1234567, "matmul_parameters": 1200000,
    "batch_per_device": 4, "gradient_accumulation_steps": 2, "is_recomputed": False, "peak_flops": 989.4e12,
    "throughput_warmup_steps": 3,
}  # fmt: skip
STAGE = {
    "stage": "read into shards", "rank": 0, "seconds": 1.5, "host_before_bytes": 10**8, "host_after_bytes": 2 * 10**8,
    "host_peak_bytes": 3 * 10**8, "device_before_bytes": 0, "device_after_bytes": 0, "device_peak_bytes": 0,
}  # fmt: skip


def write(path, entries, tail=""):
    (path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail)


def entry(step, **changes):
    seconds = dict.fromkeys(PHASES, 0.0) | {"data": 0.5, "forward_backward": 1.25, "optimizer": 0.25}
    return {
        "step": step, "loss": 4.0 / step, "num_steps": 1, "tokens": 200, "step_seconds": 2.0, "tokens_per_second": 100.0,
        "tokens_per_second_per_device": 50.0, "mfu": 0.4, "seconds": seconds, "host_bytes": [10**8, 2 * 10**8],
        "device_bytes": [10**9, 10**9], "device_valley_bytes": [8 * 10**9, 7 * 10**9],
        "device_peak_bytes": [70 * 10**9, 74 * 10**9], "device_reserved_peak_bytes": [76 * 10**9, 75 * 10**9],
    } | changes  # fmt: skip


def full_run(steps=40):
    cold = [entry(step, is_warmup=True, tokens_per_second=1.0) for step in (1, 2, 3)]
    return [STAGE, START, *cold, *(entry(step) for step in range(4, steps + 1)), {"step": 40, "eval_loss": 0.5}]


def rows(text):
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1] for line in cells if len(line) == 2}


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A directory with the report of a full run."""
    directory = tmp_path_factory.mktemp("run")
    write(directory, full_run())
    report.write_report(directory, ["A note."])
    return directory


@pytest.fixture
def no_plots(monkeypatch):
    """Leave out the plots, which take most of the time of a report."""
    monkeypatch.setattr(report, "_write_plots", lambda *_: [])


def test_tables_show_what_was_measured(reported):
    text = (reported / report.REPORT_FILE).read_text()
    found = rows(text)
    assert text.startswith("# fsdp_training_20250209-1430_tiny_1_2_1_4\n")
    assert found["steps"] == "40"
    assert found["ranks"] == "2 x NVIDIA H200, bfloat16"
    assert found["batch size"] == "16 = 4 per rank x 2 ranks x 2 accumulated"
    assert found["evaluation loss, last"] == "0.5000"
    assert found["step time, median"] == "2.00 s"
    assert found["throughput, mean, padding excluded"] == "100 tokens/s (50 per rank)"  # excludes the warm-up's 1
    assert found["MFU"] == "40.0% of dense peak FLOP/s"
    assert found["host memory, peak over logged steps, largest rank"] == "0.20 GB"
    assert found["device memory allocated, peak, largest rank"] == "74.00 GB"
    assert found["device memory allocated between steps (valley), largest rank"] == "8.00 GB"
    assert found["data"] == "0.500 s (25.0%)"
    assert "read into shards    0     1.50                 100      200      300" in text
    assert "A note." in text


def test_log_is_named_after_the_run_and_has_loss_time_and_memory(reported):
    lines = (reported / "fsdp_training_20250209-1430_tiny_1_2_1_4.txt").read_text().splitlines()
    assert "device memory allocated, peak, largest rank: 74.00 GB" in lines
    assert lines[-1].split() == ["40", "0.1000", "2.000", "74.00", "GB"]
    assert len(lines) - lines.index("") == 42  # a header and 40 steps


@pytest.mark.parametrize("name", [report.LOSS_PLOT, report.THROUGHPUT_PLOT, report.MEMORY_PLOT])
def test_plot_is_a_png_with_lines_in_it(name, reported):
    assert f"]({name})" in (reported / report.REPORT_FILE).read_text()
    pixels = matplotlib.image.imread(reported / name)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 800
    rgb = (pixels[..., :3] * 255).round()
    for color in ((0x1F, 0x5A, 0x8C), (255, 255, 255)):  # the plot has a line, not only axes
        assert (rgb == color).all(axis=-1).any()


def labels(axes):
    return axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()


def series(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}


def test_loss_plot_has_a_centered_mean_and_the_evaluations():
    steps = [entry(step, loss=100.0 - step) for step in range(1, 41)]
    (axes,) = plots.draw_loss(steps, [{"step": 20, "eval_loss": 3.0}, {"step": 40, "eval_loss": 2.0}]).axes
    assert labels(axes) == ("Loss", "optimizer step", "nats per token")
    drawn = series(axes)
    assert drawn["training"] == [(step, 100.0 - step) for step in range(1, 41)]
    means = [value for _, value in drawn["mean of 5"]]
    assert means == pytest.approx([100.0 - step for step in range(1, 41)])  # the mean of a straight line is the line
    assert drawn["evaluation"] == [(20, 3.0), (40, 2.0)]
    assert axes.get_ylim()[0] == 0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(drawn)


def test_throughput_plot_shows_the_warm_up_apart_and_the_phases_of_a_step():
    steps = [line for line in full_run() if "loss" in line]
    speed, split = plots.draw_throughput(steps).axes
    assert labels(speed) == ("Throughput", "", "tokens/s, all ranks, padding excluded")
    assert series(speed)["warm-up (not averaged)"] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert {value for _, value in series(speed)["as logged"]} == {100.0}
    assert labels(split) == ("Time per step", "optimizer step", "seconds per step")
    bars = {container.get_label(): container for container in split.containers}
    assert list(bars) == ["data", "forward + backward", "optimizer"]  # phases that took no time are left out
    assert [bar.get_height() for bar in bars["forward + backward"]] == [1.25] * 40
    top = bars["optimizer"][0]
    assert top.get_y() + top.get_height() == 2.0


def test_bars_of_a_long_run_are_merged():
    steps = [
        entry(step, num_steps=10, seconds=dict.fromkeys(PHASES, 0.0) | {"data": 5.0}) for step in range(10, 5001, 10)
    ]
    _, split = plots.draw_throughput(steps).axes
    (bars,) = split.containers
    assert len(bars) <= plots.MAX_BARS
    assert {bar.get_height() for bar in bars} == {0.5}


def test_memory_plot_shows_valley_and_peak_and_every_rank():
    device, host = plots.draw_memory([entry(step) for step in range(1, 5)]).axes
    assert labels(device) == ("Device memory, largest rank", "", "GB allocated")
    drawn = series(device)
    assert {value for _, value in drawn["peak within steps"]} == {74.0}
    assert {value for _, value in drawn["between steps (valley)"]} == {8.0}
    assert list(series(host)) == ["rank 0", "rank 1"]
    assert labels(host)[2] == "GB, anonymous pages"


def test_memory_plot_has_one_panel_on_cpu_and_a_band_for_many_ranks():
    zeros = {key: [0, 0] for key in entry(1) if key.startswith("device")}
    assert len(plots.draw_memory([entry(step, **zeros) for step in (1, 2)]).axes) == 1
    many = [entry(step, host_bytes=[rank * 10**9 for rank in range(16)]) for step in (1, 2)]
    host = plots.draw_memory(many).axes[-1]
    assert series(host)["largest rank"] == [(1, 15.0), (2, 15.0)] and "smallest rank" in series(host)


def test_last_entry_of_a_repeated_step_wins(tmp_path, no_plots):
    again = [START | {"from_step": 20}, *(entry(step, loss=9.0) for step in range(21, 31))]
    write(tmp_path, [START, *(entry(step) for step in range(1, 26)), *again])
    found = rows(report.write_report(tmp_path).read_text())
    assert found["steps"] == "30 of 40 (in progress or interrupted)"
    assert found["resumed from step"] == "20"
    assert found["training loss, mean of the last 5 logged steps"].startswith("9.0000")


def test_incomplete_last_line_is_skipped(tmp_path, no_plots):
    write(tmp_path, [entry(1), entry(2)], tail='{"step": 3, "lo')
    assert [e["step"] for e in metrics_file.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert rows(report.write_report(tmp_path).read_text())["steps"] == "2"


@pytest.mark.parametrize("line", [{"loss": 1.0}, {"eval_loss": 1.0}, {"step": True, "loss": 1.0}, {"ended_at_step": 3}])
def test_line_without_the_step_that_it_needs_is_skipped(tmp_path, no_plots, line):
    write(tmp_path, [entry(1), line, entry(2)])
    assert rows(report.write_report(tmp_path).read_text())["steps"] == "2"


@pytest.mark.parametrize(
    "line",
    [
        entry(2, loss="x"),
        entry(2, loss=None),
        entry(2, tokens_per_second="x"),
        entry(2, seconds=[1]),
        entry(2, host_bytes=["x"]),
        {"step": 2, "eval_loss": "x"},
        {"run": "x"},
        START | {"max_steps": "x"},
        STAGE | {"extra": 1},
        STAGE | {"seconds": "x"},
        {"stage": "x"},
    ],
)
def test_line_with_a_wrong_value_is_one_error(tmp_path, no_plots, line):
    write(tmp_path, [STAGE, entry(1), line, entry(3)])
    with pytest.raises(DataError, match=rf"a line of {tmp_path}/metrics\.jsonl has missing or invalid values"):
        report.write_report(tmp_path)


def test_run_without_steps_still_gets_a_report(tmp_path):
    assert "No steps logged" in report.write_report(tmp_path).read_text()


def test_entries_without_throughput_are_rendered(tmp_path):
    old = [{"step": step, "loss": 1.0, "step_seconds": 2.0, "host_bytes": [10**8]} for step in (1, 2)]
    write(tmp_path, old)
    found = rows(report.write_report(tmp_path).read_text())
    assert (found["steps"], found["step time, median"]) == ("2", "2.00 s")


def test_run_shorter_than_its_warm_up_has_no_throughput(tmp_path, no_plots):
    write(tmp_path, [START, entry(1, is_warmup=True), entry(2, is_warmup=True)])
    found = rows(report.write_report(tmp_path).read_text())
    assert found["throughput"] == "n/a (the run ended during warm-up)"


def test_unknown_device_has_no_mfu(tmp_path, no_plots):
    write(tmp_path, [START | {"no_mfu": "no bfloat16 peak FLOP/s known for X"}, entry(5, mfu=None)])
    (tmp_path / "metrics.jsonl").write_text((tmp_path / "metrics.jsonl").read_text().replace('"mfu": null, ', ""))
    found = rows(report.write_report(tmp_path).read_text())
    assert found["MFU"] == "n/a (no bfloat16 peak FLOP/s known for X)"


def test_command_renders_a_run_and_rejects_a_directory_without_metrics(tmp_path):
    write(tmp_path, full_run(steps=7))
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0 and result.stdout == f"report: {tmp_path / 'report.md'}\n"
    assert (tmp_path / "memory.png").is_file()
    with pytest.raises(DataError, match=r"has no metrics.jsonl.*report: true"):
        CliRunner().invoke(app, ["report", str(tmp_path / "no")], catch_exceptions=False)


def test_committed_sample_is_what_the_command_writes(tmp_path):
    sample = Path(__file__).resolve().parents[2] / "docs" / "sample_report"
    shutil.copy(sample / "metrics.jsonl", tmp_path)
    assert report.write_report(tmp_path).read_text() == (sample / "report.md").read_text()
    [log] = sample.glob("fsdp_training_*.txt")
    assert (tmp_path / log.name).read_text() == log.read_text()
    for name in (report.LOSS_PLOT, report.THROUGHPUT_PLOT, report.MEMORY_PLOT):
        assert matplotlib.image.imread(sample / name).shape == matplotlib.image.imread(tmp_path / name).shape
