"""Recipes on the device: losses and exports are those of CPU ranks."""

import pytest
import torch
from safetensors.torch import load_file

from tests.device.cases import CASES

# The device's kernels are the CPU's, so in fp32 only the order in which collectives add may differ.
FP32 = {"rtol": 1e-5, "atol": 1e-6}
BF16 = {"rtol": 2**-7, "atol": 2**-7}  # a rounding of bfloat16


def tolerance(name):
    return FP32 if CASES[name].precision == "no" and CASES[name].model[1] == "float32" else BF16


def weights(output):
    """Return the tensors of all exports of a run, by file and name."""
    return {
        (file.parent.name, name): tensor.float()
        for file in sorted(output.glob("export*/*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("name", CASES)
def test_losses_and_exports_are_those_of_cpu_ranks(runs, name):
    on_device, on_cpu = runs.get(name), runs.get(name, "cpu")
    assert on_device.losses == pytest.approx(on_cpu.losses, rel=tolerance(name)["rtol"])
    assert len(on_device.losses) == on_device.settings["max_steps"]
    exported, expected = weights(on_device.output), weights(on_cpu.output)
    assert exported.keys() == expected.keys()
    assert len({directory for directory, _ in exported}) == 1 + on_device.settings.get("merge_adapter", False)
    for key, tensor in expected.items():
        torch.testing.assert_close(exported[key], tensor, **tolerance(name), msg=lambda text, key=key: f"{key}: {text}")


def test_every_rank_may_read_its_own_slices(runs):
    assert runs.get("direct").losses == runs.get("full").losses
