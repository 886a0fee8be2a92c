"""Recipes on the device have the losses and exports of CPU ranks."""

import pytest
from safetensors.torch import load_file

from tests.device.cases import CASES

# The device's kernels are the CPU's, but collectives may add in another order. AdamW divides by the gradient's own size, so if
# a gradient is almost zero, its rounding error moves a weight by a fraction of the learning rate, 1e-2.
LOSS, WEIGHT = 1e-5, 1e-4
# In bfloat16 the device has its own autocast rules and 4-bit kernels, and each of AdamW's first steps moves a weight by the
# learning rate, so the exports cannot be compared.
LOSS_IN_BF16 = 2**-8


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
    is_fp32 = CASES[name].precision == "no" and CASES[name].model[1] == "float32"
    assert on_device.losses == pytest.approx(on_cpu.losses, rel=LOSS if is_fp32 else LOSS_IN_BF16)
    assert len(on_device.losses) == on_device.settings["max_steps"]
    exported, expected = weights(on_device.output), weights(on_cpu.output)
    assert exported.keys() == expected.keys()
    assert len({directory for directory, _ in exported}) == 1 + on_device.settings.get("merge_adapter", False)
    if is_fp32:
        different = {key: (exported[key] - tensor).abs().max().item() for key, tensor in expected.items()}
        assert {key: value for key, value in different.items() if value > WEIGHT} == {}


def test_every_rank_may_read_its_own_slices(runs):
    assert runs.get("direct").losses == runs.get("full").losses
