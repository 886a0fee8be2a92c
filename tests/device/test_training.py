"""Runs on the device have the losses and exports of CPU ranks, also if killed, stopped or moved."""

import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.device.runs import CASES, train

# The device's kernels are the CPU's, but collectives may add in another order. AdamW divides by the
# gradient's own size, so if a gradient is almost zero, its rounding error moves a weight by a
# fraction of the learning rate, 1e-2.
LOSS, WEIGHT = 1e-5, 1e-4
LOSS_IN_BF16 = 2**-8  # the device has its own autocast rules


def weights(output):
    """Return the tensors of all exports of a run, by directory and name."""
    return {
        (file.parent.name, name): tensor.float()
        for file in sorted(output.glob("export*/*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("name", [name for name in CASES if name != "stock"])
def test_losses_and_exports_are_those_of_cpu_ranks(runs, name):
    on_device, on_cpu = runs.get(name), runs.on_cpu[name]
    is_fp32 = CASES[name].precision == "no" and "quantization" not in CASES[name].options
    assert on_device.losses == pytest.approx(on_cpu.losses, rel=LOSS if is_fp32 else LOSS_IN_BF16)
    exported, expected = weights(on_device.output), weights(on_cpu.output)
    assert exported.keys() == expected.keys()
    assert len({directory for directory, _ in exported}) == 1 + ("lora" in CASES[name].options)
    if is_fp32:
        different = {
            key: (exported[key] - tensor).abs().max().item() for key, tensor in expected.items()
        }
        assert {key: value for key, value in different.items() if value > WEIGHT} == {}


@pytest.mark.parametrize("name", ["full", "lora", "offload"])
def test_a_killed_run_resumes_to_the_same_weights(runs, tmp_path, name):
    options = (dict(CASES[name].options), False, int(signal.SIGKILL))
    if CASES[name].fsdp:
        shutil.copytree(runs.get(name).output / "checkpoint-4", tmp_path / "checkpoint-4")
    else:
        arguments = runs.inputs.arguments(name, tmp_path)
        statuses = runs.ranks.run_to_signal(train, *arguments, *options)
        assert statuses == [-signal.SIGKILL] * 2
    assert not (tmp_path / "export").exists()
    assert runs.train(name, tmp_path, resume=True) == runs.get(name).losses
    ours, theirs = weights(tmp_path), weights(runs.get(name).output)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_sigterm_ends_the_run_with_a_checkpoint(runs, tmp_path):
    arguments = runs.inputs.arguments("full", tmp_path)
    options = (dict(CASES["full"].options), False, int(signal.SIGTERM))
    runs.ranks.run_to_signal(train, *arguments, *options)
    assert (tmp_path / "checkpoint-5" / "manifest.json").exists()
    assert not (tmp_path / "export").exists()
    assert runs.train("full", tmp_path, resume=True) == runs.get("full").losses


def test_a_run_resumes_on_another_number_of_devices(runs, tmp_path):
    shutil.copytree(runs.get("full").output / "checkpoint-4", tmp_path / "checkpoint-4")
    losses = runs.train("full", tmp_path, resume=True, num_ranks=1, gradient_accumulation_steps=2)
    assert losses == pytest.approx(runs.get("full").losses, rel=1e-4)
