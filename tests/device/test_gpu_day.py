"""`make gpu-day` in small, on the emulated accelerator."""

import pytest

from benchmarks.gpu_day.runner import make_steps
from tests.test_gpu_day_launch import check_figures, measure


@pytest.mark.timeout(600)
def test_all_steps_run_on_an_accelerator(package, tmp_path):
    # Accelerate allows gloo on CUDA only.
    steps = [name for name in make_steps() if name != "two_ranks"]
    environment = {"PYTHONPATH": str(package), "EMU_DEVICES": "1", "TORCHDYNAMO_DISABLE": "1"}
    found = measure(tmp_path, "--steps", *steps, **environment)
    check_figures(found)
    assert found["load_model"]["device peak GB"] < found["load_stock"]["device peak GB"]
    assert found["lora"]["allocated peak GB"] > 0
