"""The report of a run: its table, log and plots, from metrics.jsonl alone."""

import json

import matplotlib.image
import pytest

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.metrics import metrics_file, report
from hf_fsdp_recipes.metrics.metrics_file import PHASES

RUN = "fsdp_training_20250209-1430_tiny_1_2_1_4"
START = {
    "run": RUN,
    "model": "tiny",
    "from_step": 0,
    "max_steps": 40,
    "num_ranks": 2,
    "device": "NVIDIA H200",
    "dtype": "bfloat16",
    "matmul_parameters": 1200000,
    "trainable_parameters": 4000,
    "batch_per_device": 4,
    "gradient_accumulation_steps": 2,
}


def step(number, **changes):
    seconds = dict.fromkeys(PHASES, 0.0) | {
        "data": 0.5,
        "forward_backward": 1.25,
        "optimizer": 0.25,
    }
    return {
        "step": number,
        "loss": 4.0 / number,
        "num_steps": 1,
        "tokens": 200,
        "step_seconds": 2.0,
        "mfu": 0.4,
        "tokens_per_second": 100.0,
        "tokens_per_second_per_device": 50.0,
        "seconds": seconds,
        "host_bytes": [10**8, 2 * 10**8],
        "device_valley_bytes": [8 * 10**9, 7 * 10**9],
        "device_peak_bytes": [70 * 10**9, 74 * 10**9],
        "device_reserved_peak_bytes": [76 * 10**9, 75 * 10**9],
    } | changes


def write(directory, entries, tail=""):
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in entries) + tail
    )


def table(directory):
    text = report.write_report(directory).read_text()
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1] for line in cells}


def test_report_and_log_show_what_was_measured(tmp_path):
    cold = [step(number, is_warmup=True, tokens_per_second=1.0, mfu=0.1) for number in (1, 2, 3)]
    write(
        tmp_path,
        [START, *cold, *map(step, range(4, 41)), {"step": 40, "eval_loss": 0.5}],
        tail='{"step": 41, "lo',
    )
    found = table(tmp_path)
    assert found == found | {
        "steps": "40 of 40",
        "ranks": "2 x NVIDIA H200, bfloat16",
        "batch size": "16 = 4 x 2 ranks x 2 accumulated",
        "evaluation loss, last": "0.5000",
        "step time, median": "2.000 s",
        "throughput, padding excluded": "100 tokens/s (50 per rank)",  # without the warm-up
        "MFU": "40.0% of the dense peak",
        "tokens in total, padding excluded": "8,000 in 40 steps",
        "wall time of these steps": "0:01:20",
        "host memory at optimizer steps, without cached files, largest rank": "0.20 GB",
        "device memory allocated, peak, largest rank": "74.00 GB",
        "device memory allocated between steps (valley), largest rank": "8.00 GB",
        "device memory reserved, peak, largest rank": "76.00 GB",
        "shares of the time": "data 25.0%, forward_backward 62.5%, optimizer 12.5%",
    }
    lines = (tmp_path / f"{RUN}.txt").read_text().splitlines()
    assert "MFU: 40.0% of the dense peak" in lines
    assert lines[-1].split() == ["40", "0.1000", "2.000", "74.00", "GB"]
    pixels = matplotlib.image.imread(tmp_path / "report.png")[..., :3]
    assert (
        f"# {RUN}\n" in (tmp_path / "report.md").read_text() and pixels.min() < 0.5 < pixels.max()
    )


def plots(*entries):
    """Return {title: {label: points}}."""
    return {
        axes.get_title("left").partition(",")[0]: {
            line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()
        }
        for axes in report.draw(entries).axes
    }


def test_plots_show_loss_throughput_phases_and_memory():
    phases = {"data": 0.5, "forward_backward": 1.25, "optimizer": 0.25}
    assert plots(START, step(1), step(2), {"step": 2, "eval_loss": 3.0}) == {
        "Loss": {"training": [(1, 4.0), (2, 2.0)], "evaluation": [(2, 3.0)]},
        "Tokens/s": {"all ranks": [(1, 100.0), (2, 100.0)]},
        "MFU": {"all ranks": [(1, 0.4), (2, 0.4)]},
        "Seconds per step": {phase: [(1, value), (2, value)] for phase, value in phases.items()},
        "Host memory without cached files": {"largest rank": [(1, 0.2), (2, 0.2)]},
        "Device memory of the largest rank": {
            "peak": [(1, 74.0), (2, 74.0)],
            "between steps": [(1, 8.0), (2, 8.0)],
        },
    }


def test_plots_leave_out_what_was_not_measured_and_mark_resumes():
    cold = step(1, device_peak_bytes=[0, 0], device_valley_bytes=[0, 0])
    for name in ("mfu", "tokens_per_second", "tokens_per_second_per_device"):
        del cold[name]
    assert plots(START, cold).keys() == {
        "Loss",
        "Seconds per step",
        "Host memory without cached files",
    }
    resumed = report.draw([START, step(1), START | {"from_step": 1}, step(2)])
    for axes in resumed.axes:
        [marks] = axes.collections
        assert marks.get_label() == "resumed" and marks.get_segments()[0][0, 0] == 1


def test_a_run_that_is_going_or_ended_in_its_warm_up_has_a_report(tmp_path):
    write(tmp_path, [START])
    assert table(tmp_path)["steps"] == "0 of 40"
    for name in ("report.md", f"{RUN}.txt"):
        assert "No step is logged yet" in (tmp_path / name).read_text()
    assert not (tmp_path / "report.png").exists()
    write(
        tmp_path,
        [START | {"no_mfu": "no float32 peak FLOP/s known for cpu"}, step(1, is_warmup=True)],
    )
    found = table(tmp_path)
    assert found["MFU"] == "n/a (no float32 peak FLOP/s known for cpu)"
    assert "throughput, padding excluded" not in found


def test_a_resumed_run_keeps_earlier_steps_and_drops_those_that_it_repeats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics_file.begin(path, START)
    for number in (1, 2, 3):
        metrics_file.append(path, step(number))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    metrics_file.begin(path, START | {"from_step": 2})
    metrics_file.append(path, step(3, loss=30.0))
    entries = metrics_file.read_metrics(path)
    assert [entry.get("step", "start") for entry in entries] == ["start", 1, 2, "start", 3]
    assert list(tmp_path.iterdir()) == [path]
    assert table(tmp_path)["resumed from step"] == "2"


WRONG = {
    "no metrics": None,
    "text": step(2, loss="x"),
    "no seconds": {"step": 2, "loss": 1.0},
    "a start": {"run": "x"},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_reported_is_one_error(case, tmp_path):
    if WRONG[case] is not None:
        write(tmp_path, [step(1), WRONG[case]])
    with pytest.raises(ToolError, match=f"{tmp_path}/metrics.jsonl"):
        report.write_report(tmp_path)
