"""Checkpoints of every Trainer are complete, verified, and resumed exactly.

Under FSDP, with DDP, and in one process, of full fine-tuning and of LoRA.
"""

import functools
import json
import os
import random
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from tests.ranks.harness import start_ranks
from tests.saving.damage import damage
from tests.saving.runs import (
    BEST,
    before_last_file,
    contents_of,
    describe,
    digests_in,
    names_in,
    on,
    steps_in,
    train,
)

CASES = {
    "fsdp": {"world": "fsdp"},
    "fsdp, LoRA": {"world": "fsdp", "lora": True},
    "full state": {"world": "full state"},
    "ddp": {"world": "ddp"},
    "ddp, LoRA": {"world": "ddp", "lora": True},
    "one": {"world": "one"},
    "one, LoRA": {"world": "one", "lora": True},
}
# These files contain the output directory, or when they were written.
WITH_PATHS = ("trainer_state.json", "training_args.bin", ".metadata")


def _be_best_at_step_2(trainer):
    """Let step 2 have the best model, and note the weights of each step."""
    torch.serialization.set_crc32_options(False)  # our writer leaves checksums to the manifest
    scores = {2: 1, 4: 3}
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}
    on(trainer, "on_step_end", lambda *_: trainer.notes.append(describe(trainer)["trained"]))


def _train_stock_and_ours(output, callback, **options):
    stock = train(output / "stock", stock=True, **options)
    return stock, train(output / "ours", callback=callback, **options)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def finished(request, run, tmp_path_factory):
    """Return runs of stock Trainer and of ours that have loaded the best model at the end."""
    folder = tmp_path_factory.mktemp("finished")
    options = request.param | BEST | {"prepare": _be_best_at_step_2}
    callback = {"export_dir": folder / "export"}
    both = run(folder, function=_train_stock_and_ours, callback=callback, **options)
    stock, ours = zip(*both, strict=True)
    return SimpleNamespace(folder=folder, options=options, stock=stock, ours=ours)


def _without_path(result):
    """Return a result without the best model's checkpoint, which lies in the output directory."""
    return result | {"best": result["best"][:2]}


def test_what_is_trained_is_what_stock_trains(finished):
    for stock, ours in zip(finished.stock, finished.ours, strict=True):
        assert _without_path(ours) == _without_path(stock)
        assert ours["best"] == (1, 2, str(finished.folder / "ours" / "checkpoint-2"))
        assert ours["trained"] == ours["notes"][1]
        assert ours["error"] is None and ours["warnings"] == []


def test_a_checkpoint_holds_stocks_files_and_a_manifest_of_all(finished):
    assert steps_in(finished.folder / "ours") == [2, 4]
    assert names_in(finished.folder / "ours") == ["checkpoint-2", "checkpoint-4"]
    for step in (2, 4):
        stock = contents_of(finished.folder / "stock" / f"checkpoint-{step}")
        ours = contents_of(finished.folder / "ours" / f"checkpoint-{step}")
        assert stock.keys() <= ours.keys()
        for name, content in stock.items():
            assert name.endswith(WITH_PATHS) or ours[name] == content, name
        manifest = json.loads(ours["manifest.json"])
        num_ranks = len(finished.ours)
        assert (manifest["step"], manifest["world_size"]) == (step, num_ranks)
        assert manifest["global_batch_size"] == 2 * num_ranks


def test_the_best_model_is_exported(finished):
    assert digests_in(finished.folder / "export") == finished.ours[0]["notes"][1]


def test_a_checkpoint_with_one_changed_byte_is_skipped(finished, tmp_path, caplog):
    from hf_fsdp_recipes import latest_checkpoint

    output = shutil.copytree(finished.folder / "ours", tmp_path / "run")
    assert latest_checkpoint(output) == str(output / "checkpoint-4")
    files = [path for path in (output / "checkpoint-4").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    damage(largest, "flip", random.Random(0))
    assert latest_checkpoint(output) == str(output / "checkpoint-2")
    assert largest.name in caplog.text


def _die_in_step_4(trainer):
    _be_best_at_step_2(trainer)
    before_last_file(trainer, 4, lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.fixture(scope="module")
def killed(finished, worlds, run):
    """Kill a run while Trainer writes step 4. Return its checkpoints then, and the resumed run."""
    output = finished.folder / "killed"
    options = finished.options | {"callback": {"export_dir": finished.folder / "export-of-killed"}}
    world = options.pop("world")
    function = functools.partial(train, output, **options | {"prepare": _die_in_step_4})
    processes, _ = start_ranks(function, len(finished.ours), environment=worlds[world])
    for process in processes:
        process.join(60)
    assert processes[0].exitcode == -signal.SIGKILL
    steps = steps_in(output)
    options["world"] = world
    results = run(output, **options)
    return SimpleNamespace(output=output, options=options, steps=steps, results=results)


def test_a_run_killed_while_trainer_writes_is_resumed_exactly(finished, killed):
    assert killed.steps == [2]
    for whole, resumed in zip(finished.ours, killed.results, strict=True):
        expected = whole | {"resumed": "checkpoint-2", "notes": whole["notes"][2:]}
        assert _without_path(resumed) == _without_path(expected)
    assert names_in(killed.output) == ["checkpoint-2", "checkpoint-4"]
    for name in ("killed", "export-of-killed"):
        whole = name.replace("-of", "").replace("-killed", "").replace("killed", "ours")
        exact = contents_of(finished.folder / whole)
        for file, content in contents_of(finished.folder / name).items():
            # A loaded optimizer pickles equal keys apart.
            is_described = file.endswith((*WITH_PATHS, "manifest.json", "run.json", ".bin"))
            assert is_described or content == exact[file], file


def _inodes(directory):
    """Return each file's number and when it was changed."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def test_a_finished_run_that_is_started_again_returns_the_best_model_and_adds_nothing(
    finished, killed, run
):
    before = _inodes(finished.folder)
    for whole, again in zip(finished.ours, run(killed.output, **killed.options), strict=True):
        expected = whole | {"resumed": "checkpoint-4", "notes": [], "optimizer": again["optimizer"]}
        assert _without_path(again) == _without_path(expected)
    assert _inodes(finished.folder) == before


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_a_finished_run_of_whole_epochs_that_is_started_again_adds_nothing(run, tmp_path, world):
    options = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 24}
    options |= {"world": world, "callback": {"export_dir": tmp_path / "export"}}
    whole = run(tmp_path / "run", 1, **options)[0]
    before = _inodes(tmp_path)
    again = run(tmp_path / "run", 1, **options)[0]
    assert again["weights"] == whole["weights"] and again["step"] == 2
    assert _inodes(tmp_path) == before


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_saves_on_each_node_are_refused_before_training(run, tmp_path, world):
    for result in run(tmp_path / "run", world=world, save_on_each_node=True):
        assert "save_on_each_node is set" in result["error"] and result["losses"] == {}
    assert names_in(tmp_path / "run") == []


def _save_model(output, lora):
    """Save the model in step 3 and after training. Return the trained weights at both times."""
    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.upstream import patches
    from tests.saving.runs import make_trainer

    patches.enable_cpu_ranks()
    trainer = make_trainer(output / "run", [ShardedCheckpointCallback()], lora=lora)
    saved = []

    def save(state, control):
        saved.append(describe(trainer)["trained"])
        trainer.save_model(str(output / f"step-{state.global_step}"))

    on(trainer, "on_step_end", lambda state, control: state.global_step == 3 and save(state, None))
    trainer.train()
    save(trainer.state, None)
    trainer.save_model(_internal_call=True)  # as Trainer.push_to_hub does
    return saved


@pytest.mark.parametrize("lora", [False, True])
def test_save_model_writes_the_model_during_and_after_training(run, tmp_path, lora):
    saved = run(tmp_path, function=_save_model, lora=lora)[0]
    for step, weights in zip((3, 4), saved, strict=True):
        assert digests_in(tmp_path / f"step-{step}") == weights
        config = "adapter_config.json" if lora else "config.json"
        assert (tmp_path / f"step-{step}" / config).is_file()
    assert digests_in(tmp_path / "run") == saved[-1]
    assert steps_in(tmp_path / "run") == [2, 4]
