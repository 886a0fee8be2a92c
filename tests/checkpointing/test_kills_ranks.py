"""Kills at random moments of saving: the next `auto` resume starts from a complete checkpoint and loses nothing."""

import os
import random
import signal
import time

import psutil
import pytest

from tests.checkpointing.test_save_ranks import train
from tests.ranks.harness import FSDP2, fsdp_environment, start_ranks
from tests.recipes.launching import kill_tree, run, start
from tests.recipes.test_sft import CPU, losses, recipe

STEPS = 12
KEYWORDS = {"steps": STEPS, "save_steps": 1, "save_total_limit": 3}
NUM_TRIALS = 12


def _train_forever(model, data, output):
    from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint
    from tests.ranks.training import build

    checkpoint = latest_checkpoint(output)
    keywords = {"save_strategy": "steps"} | KEYWORDS
    trainer = build(str(model), str(data), str(output), callbacks=[ShardedCheckpointCallback()], **keywords)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, text_file, tmp_path_factory):
    return train(tiny_model("llama"), text_file, tmp_path_factory.mktemp("whole"), **KEYWORDS)


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["all ranks", "one rank"])
@pytest.mark.parametrize("trial", range(NUM_TRIALS))
def test_killed_while_saving(tiny_model, text_file, tmp_path, uninterrupted, victims, trial):
    moment = random.Random(f"{victims} {trial}")
    processes, _results = start_ranks(
        _train_forever, 2, tiny_model("llama"), text_file, tmp_path, environment=fsdp_environment(FSDP2)
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("checkpoint-*")):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(moment.uniform(0, 0.6))
        for process in processes if victims == "all ranks" else [moment.choice(processes)]:
            process.kill()
        for process in processes:
            process.join(30)
            assert not process.is_alive(), "the other rank hangs"
    finally:
        for process in processes:
            process.kill()
    assert train(tiny_model("llama"), text_file, tmp_path, resume=True, **KEYWORDS) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(6))
def test_launcher_killed_while_saving(tiny_model, text_file, tmp_path, trial):
    """The orphaned ranks write a checkpoint and end by themselves; the next run continues from that checkpoint."""
    moment = random.Random(f"launcher {trial}")
    settings = {"max_steps": 60, "save_steps": 1, "save_total_limit": 3}
    config = recipe(tmp_path, model_name_or_path=tiny_model("llama"), dataset_name=text_file, **settings)
    output = tmp_path / "run"
    process = start(config)
    try:
        deadline = time.monotonic() + 90
        while not list(output.glob("checkpoint-*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moment.uniform(0, 1.5))
        orphans = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(orphans, timeout=30)
        assert not alive, "ranks went on without their launcher"
    finally:
        kill_tree(process)
    resumed = run(CPU, ["--config", config, "--resume_from_checkpoint", "auto"])
    assert resumed.returncode == 0, resumed.stdout
    whole = run(CPU, ["--config", config, "--output_dir", tmp_path / "whole"])
    assert losses(output) == losses(tmp_path / "whole"), whole.stdout
