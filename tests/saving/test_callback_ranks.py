"""What users of Trainer rely on keeps working.

These are their own callbacks and strategies, other trainers, and runs without FSDP.
"""

import functools
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest

from hf_fsdp_recipes import export_checkpoint
from tests.ranks.harness import run_ranks
from tests.saving.runs import BEST, describe, digests_in, on, rank, steps_in, train


def _save_step_3_and_write_into_it(trainer):
    """Ask for a save as users' callbacks do, and add a file to it, as callbacks for adapters do."""

    def ask(state, control):
        control.should_save |= state.global_step == 3

    def write(state, control):
        checkpoint = Path(trainer.args.output_dir, f"checkpoint-{state.global_step}")
        has_weights = (checkpoint / "pytorch_model_fsdp_0" / ".metadata").is_file()
        trainer.notes.append((state.global_step, has_weights))
        (checkpoint / f"extra-{rank()}.txt").write_text("of another callback")

    on(trainer, "on_step_end", ask)
    on(trainer, "on_save", write)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_a_users_callback_asks_for_is_complete_and_keeps_what_on_save_adds(
    run, tmp_path, asynchronous
):
    prepare, callback = _save_step_3_and_write_into_it, {"asynchronous": asynchronous}
    results = run(tmp_path, save_strategy="no", prepare=prepare, callback=callback)
    assert steps_in(tmp_path) == [3] and [path.name for path in tmp_path.iterdir()] == [
        "checkpoint-3"
    ]
    assert len(list(tmp_path.glob("checkpoint-3/extra-*"))) == 2
    assert [[step for step, _ in result["notes"]] for result in results] == [[3], [3]]
    if not asynchronous:  # then on_save finds the sharded weights
        assert [result["notes"] for result in results] == [[(3, True)]] * 2


def _save_at_the_end_of_epochs(trainer):
    on(trainer, "on_epoch_end", lambda state, control: setattr(control, "should_save", True))


def test_a_run_deletes_old_checkpoints_and_starts_in_no_other_runs_directory(run, tmp_path):
    # Two steps in an epoch.
    options = {"max_steps": -1, "save_total_limit": 1, "per_device_train_batch_size": 12}
    # This saves step 2 twice.
    run(tmp_path, num_train_epochs=1, prepare=_save_at_the_end_of_epochs, **options)
    assert steps_in(tmp_path) == [2]
    refused = run(tmp_path, num_train_epochs=3, resume=False, **options)[1]
    assert "of an earlier run" in refused["error"]
    resumed = run(tmp_path, num_train_epochs=3, save_strategy="epoch", **options)
    assert {result["resumed"] for result in resumed} == {"checkpoint-2"}
    assert steps_in(tmp_path) == [6] and [path.name for path in tmp_path.iterdir()] == [
        "checkpoint-6"
    ]


def _stop_early_at_step_4(trainer):
    from transformers import EarlyStoppingCallback

    trainer.add_callback(EarlyStoppingCallback(2))
    trainer.compute_metrics = lambda _: {"score": (5, 1, 2, 3)[trainer.state.global_step - 1]}
    on(
        trainer,
        "on_step_end",
        lambda state, control: trainer.notes.append(describe(trainer)["weights"]),
    )


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"save_strategy": "best"}, [2]),
        pytest.param({"save_steps": 1}, [2, 4], marks=pytest.mark.slow),  # the best and the latest
    ],
)
def test_the_best_model_is_kept_and_loaded_after_early_stopping(run, tmp_path, options, kept):
    options = BEST | {"max_steps": 8, "save_total_limit": 1, "eval_steps": 1} | options
    for result in run(tmp_path, prepare=_stop_early_at_step_4, **options):
        assert (
            result["best"] == (1, 2, str(tmp_path / "checkpoint-2")) and len(result["losses"]) == 4
        )
        assert result["weights"] == result["notes"][1]
    assert steps_in(tmp_path) == kept
    latest = tmp_path / f"checkpoint-{kept[-1]}" / "trainer_state.json"
    assert f'"best_model_checkpoint": "{tmp_path}/checkpoint-2"' in latest.read_text()


def test_without_fsdp_trainer_saves_and_the_callback_exports(tmp_path):
    function = functools.partial(train, tmp_path, callback={"export_dir": tmp_path / "export"})
    environment = {"ACCELERATE_USE_CPU": "true"}
    whole = run_ranks(function, 2, environment=environment)[0]
    files = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"optimizer.pt", "model.safetensors", "manifest.json"} <= files
    assert steps_in(tmp_path) == [2, 4]
    assert (tmp_path / "export" / "model.safetensors").is_file()
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "export")
    assert run_ranks(function, 2, environment=environment)[0] == whole | {"resumed": "checkpoint-2"}


def _train_two_models(output):
    options = {"hidden": 48, "lora": True, "resume": False}
    train(output / "first")
    return train(output / "second", **options), train(output / "stock", stock=True, **options)


def test_two_trainers_of_different_models_in_one_process_save_their_own_state(run, tmp_path):
    second, stock = run(tmp_path, function=_train_two_models)[0]
    assert second == stock
    assert steps_in(tmp_path / "first") == steps_in(tmp_path / "second") == [2, 4]
    # A trainer without the callback saves as ever.
    assert not list(tmp_path.glob("stock/**/manifest.json"))
    shutil.rmtree(tmp_path / "second" / "checkpoint-4")
    assert run(tmp_path / "second", hidden=48, lora=True)[0] == second | {"resumed": "checkpoint-2"}


def _write_late(trainer):
    """Let each save be written only when two more steps have changed the state."""
    from hf_fsdp_recipes.saving.saver import Saver

    write = Saver._write

    def write_late(self, save):
        while trainer.state.global_step < min(save.step + 2, trainer.args.max_steps):
            time.sleep(0.01)
        return write(self, save)

    Saver._write = write_late


def test_steps_after_a_save_do_not_change_what_is_written(run, tmp_path):
    whole = run(tmp_path, prepare=_write_late, max_steps=6)[0]
    assert steps_in(tmp_path) == [2, 4, 6]
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    resumed = run(tmp_path, max_steps=6)[0]
    assert resumed["resumed"] == "checkpoint-2" and resumed["weights"] == whole["weights"]


def _have_no_memory_on_rank_1(trainer):
    from hf_fsdp_recipes.saving import host_copy

    if rank() == 1:
        host_copy.available_host_bytes = lambda: 100


def _fail_to_copy_on_rank_1(trainer):
    from hf_fsdp_recipes.saving.host_copy import HostCopy

    def fail(self, state):
        raise RuntimeError("can't allocate memory")

    if rank() == 1:
        HostCopy._allocate = fail


@pytest.mark.parametrize("prepare", [_have_no_memory_on_rank_1, _fail_to_copy_on_rank_1])
def test_if_a_rank_cannot_copy_its_state_all_wait_and_nothing_is_lost(run, tmp_path, prepare):
    results = run(tmp_path, prepare=prepare)
    assert any("training waits while saves are written" in text for text in results[0]["warnings"])
    assert results[0]["error"] is None
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = run(tmp_path)[0]
    assert resumed["resumed"] == "checkpoint-2" and resumed["weights"] == results[0]["weights"]


def _add_metrics(trainer):
    from hf_fsdp_recipes import MetricsCallback

    trainer.add_callback(MetricsCallback())


def test_a_token_for_the_hub_is_written_nowhere(run, tmp_path):
    callback = {"export_dir": tmp_path / "export"}
    run(
        tmp_path,
        sft=True,
        prepare=_add_metrics,
        callback=callback,
        model_init_kwargs={"token": "hf_secret"},
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"manifest.json", "metrics.jsonl", "model.safetensors"} <= {path.name for path in files}
    assert [path for path in files if b"hf_secret" in path.read_bytes()] == []


def _save_in_another_way(trainer):
    """Stand for a version of accelerate that writes shards without torch DCP's `save`."""
    import torch.distributed.checkpoint as dcp
    import transformers.trainer

    for name in ("save_fsdp_model", "save_fsdp_optimizer"):
        function = getattr(transformers.trainer, name)
        bound = mock.patch.object(dcp, "save", dcp.save)(function)
        setattr(transformers.trainer, name, bound)


def test_what_an_accelerate_of_another_kind_writes_is_a_checkpoint_too(run, tmp_path):
    whole = run(tmp_path / "whole")
    run(tmp_path / "run", prepare=_save_in_another_way)
    assert steps_in(tmp_path / "run") == [2, 4]
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    exported = export_checkpoint(tmp_path / "run" / "checkpoint-2", tmp_path / "export")
    assert digests_in(exported) == digests_in(tmp_path / "whole" / "checkpoint-2")
    resumed = run(tmp_path / "run")
    assert resumed[0]["resumed"] == "checkpoint-2"
    assert [result["weights"] for result in resumed] == [result["weights"] for result in whole]
