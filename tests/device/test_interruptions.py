"""Runs on the device that are killed, preempted, or resumed on another number of devices, compared with undisturbed runs."""

import json
import shutil
import signal

import pytest

from tests.device.cases import CASES
from tests.device.ranks import variant
from tests.device.test_training import weights


def interrupted(runs, name, output, number):
    """Run a case until a signal in step 6, after checkpoint-4; return the settings that resume it."""
    settings = runs.settings(name, output) | {"resume_from_checkpoint": "auto"}
    template = variant(CASES[name].template, output.parent, CASES[name].precision)
    statuses = runs.ranks.interrupt(settings, template, number, at_step=6)
    return settings, template, statuses


def assert_equal_runs(settings, losses, expected):
    assert losses == expected.losses
    ours, theirs = weights(settings["output_dir"]), weights(expected.output)
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", ["full", "lora", "fsdp1", "offload"])
def test_killed_run_resumes_to_the_same_export(runs, tmp_path, name):
    settings, template, statuses = interrupted(runs, name, tmp_path / "run", signal.SIGKILL)
    assert statuses == [-signal.SIGKILL] * 2
    assert not (tmp_path / "run" / "export").exists()
    losses = runs.ranks.train(settings, template)
    assert_equal_runs(settings, losses, runs.get(name))


def test_sigterm_ends_the_run_with_a_checkpoint_and_it_resumes(runs, tmp_path):
    settings, template, statuses = interrupted(runs, "full", tmp_path / "run", signal.SIGTERM)
    assert statuses == [0, 0]  # the harness reports exceptions in a rank; they do not change the exit status
    assert (tmp_path / "run" / "checkpoint-6" / "manifest.json").exists()
    assert not (tmp_path / "run" / "export").exists()
    losses = runs.ranks.train(settings, template)
    assert_equal_runs(settings, losses, runs.get("full"))


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_run_resumes_on_another_number_of_devices(runs, tmp_path, num_ranks):
    """The global batch stays at four rows, so losses and exports differ only by the order of additions."""
    finished = runs.get("full")
    output = tmp_path / "run"
    shutil.copytree(finished.output, output, ignore=shutil.ignore_patterns("checkpoint-6", "export", "*.png"))
    settings = finished.settings | {"output_dir": output, "resume_from_checkpoint": "auto"}
    settings["per_device_train_batch_size"] = 1
    losses = runs.ranks.train(settings, finished.template, num_ranks)
    assert losses == pytest.approx(finished.losses, rel=1e-4)
    state = json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    ours, theirs = weights(output), weights(finished.output)
    assert max((ours[key] - theirs[key]).abs().max() for key in theirs) < 1e-3
