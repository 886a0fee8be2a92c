"""The report: what was measured, readable at a glance, and never a reason for a run to fail."""

import json

from hf_fsdp_recipes.measure import report


def write(path, entries, tail=""):
    (path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail)


def entry(step):
    return {
        "step": step, "loss": 4.0 / step, "step_seconds": 2.0, "tokens_per_second": 100.0, "host_bytes": [10**8, 2 * 10**8],
        "device_peak_bytes": [0, 0],
    }  # fmt: skip


def test_table_and_plot_hold_what_was_measured(tmp_path):
    import matplotlib.image

    write(tmp_path, [entry(step) for step in range(1, 41)])
    text = report.write_report(tmp_path, ["A note."]).read_text()
    assert "| steps | 40 |" in text
    assert "| seconds a step, median | 2.00 |" in text
    assert "200 MB" in text
    assert "A note." in text
    assert "![training loss](loss.png)" in text
    pixels = matplotlib.image.imread(tmp_path / report.LOSS_PLOT)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 500
    colours = {tuple((pixel * 255).astype(int)[:3]) for row in pixels[::2] for pixel in row[::2]}
    assert (0x1F, 0x5A, 0x8C) in colours  # the line is there


def test_torn_last_line_is_passed_over(tmp_path):
    write(tmp_path, [entry(1), entry(2)], tail='{"step": 3, "lo')
    assert [e["step"] for e in report.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_run_without_steps_still_gets_a_report(tmp_path):
    assert "No step was logged" in report.write_report(tmp_path).read_text()
