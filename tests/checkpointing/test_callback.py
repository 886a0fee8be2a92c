"""What the callback saves, and what it does after saves that fail, tested without ranks."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from hf_fsdp_recipes import ShardedCheckpointCallback, callback
from hf_fsdp_recipes.checkpointing import layout, resume, small_files
from hf_fsdp_recipes.checkpointing.save_schedule import SaveSchedule
from hf_fsdp_recipes.errors import CheckpointError


def test_failed_save_is_reported_once_however_many_steps_follow(caplog):
    callback = ShardedCheckpointCallback(signals=False)
    for text in ("step 2 was not written", "step 4 was not written"):
        callback._schedule = SaveSchedule(SimpleNamespace(save_strategy="steps"), last_saved_step=0)
        callback._writer = SimpleNamespace(failure=CheckpointError(text), completed=None)
        for step in range(3):
            callback.on_step_end(None, TrainerState(global_step=step), TrainerControl())
        assert caplog.text.count(text) == 1


class FakeWriter:
    """Completes or fails saves without writing; like the real one, it reports an asynchronous failure at the next call."""

    def __init__(self, output_dir, asynchronous, failing_steps):
        self.output_dir, self.asynchronous, self.failing_steps = output_dir, asynchronous, failing_steps
        self.failure = self.completed = None
        self.has_started = False

    def save(self, snapshot):
        self.has_started = self.asynchronous
        if snapshot.step in self.failing_steps:
            self.failure = CheckpointError(f"step {snapshot.step} was not written")
        else:
            self.completed = layout.directory_for(self.output_dir, snapshot.step)
            self.completed.mkdir()
        if not self.asynchronous:
            self.wait()

    def wait(self):
        self.has_started = False
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return self.completed


def arguments(output_dir, **changes):
    return SimpleNamespace(
        output_dir=str(output_dir), load_best_model_at_end=True, save_total_limit=1, save_strategy="steps", **changes
    )


@pytest.fixture
def saver(tmp_path, monkeypatch):
    """Return a function that saves steps 2, 4 and 6, each the best so far, and returns the callback and Trainer's state."""

    def save(asynchronous, failing_steps):
        monkeypatch.setattr(callback, "capture", lambda *arguments: {})
        monkeypatch.setattr(callback.small_files, "collect", lambda *arguments: {})
        monkeypatch.setattr(callback.resume, "manifest_facts", lambda *arguments: {})
        saving = ShardedCheckpointCallback(signals=False, asynchronous=asynchronous)
        saving._metric = "eval_loss"
        saving._writer = FakeWriter(tmp_path, asynchronous, failing_steps)
        state = TrainerState()
        for step in (2, 4, 6):
            state.global_step = state.best_global_step = step
            state.best_metric = 1 / step
            state.log_history.append({"step": step, "eval_loss": state.best_metric})
            saving._save(step, arguments(tmp_path), state, {"model": None, "optimizer": None})
        return saving, state

    return save


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("failing_steps", "best"), [((4,), 6), ((6,), 4), ((4, 6), 2), ((2, 4, 6), None)])
def test_failed_save_of_a_new_best_model_keeps_the_previous_one(
    saver, tmp_path, caplog, asynchronous, failing_steps, best
):
    saving, state = saver(asynchronous, failing_steps)
    saving.on_log(arguments(tmp_path), state, TrainerControl(), logs={"train_runtime": 1.0})
    assert state.best_model_checkpoint == (None if best is None else str(tmp_path / f"checkpoint-{best}"))
    assert (state.best_global_step, state.best_metric) == (
        best,
        best and 1 / best,
    )  # a later model only has to beat this
    assert ("no checkpoint of the best step, so the last weights are kept" in caplog.text) == (best is None)


def test_best_checkpoint_is_found_after_output_dir_has_moved(tmp_path):
    state = TrainerState(
        global_step=30, best_global_step=20
    )  # Trainer forgets a best checkpoint at a path that is gone
    state.stateful_callbacks = {layout.STATE_KEY: {"run": "ours"}}
    find = ShardedCheckpointCallback(signals=False)._find_best
    for run, best in (("other", None), ("ours", str(tmp_path / "checkpoint-20"))):
        (tmp_path / "checkpoint-20").mkdir(exist_ok=True)
        layout.complete_in_place(tmp_path / "checkpoint-20", {"step": 20, "run": run})
        assert find(arguments(tmp_path), state) == best


def test_run_that_starts_over_at_the_first_row_may_change_its_batch(tmp_path, monkeypatch):
    facts = {"global_batch_size": 8, "world_size": 1, "arguments": {"optim": "adamw_torch"}}
    monkeypatch.setattr(resume, "_read_batch_facts", lambda checkpoint: facts)
    monkeypatch.setattr(resume, "global_batch_size", lambda args: 16)
    resume.check_batches(None, tmp_path, starts_over=True)
    with pytest.raises(CheckpointError, match="8 rows per optimizer step, but this run has 16"):
        resume.check_batches(None, tmp_path, starts_over=False)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("failing_steps", "is_failed"), [((2,), False), ((2, 6), True)])
def test_failure_counts_until_a_later_save_succeeds(saver, asynchronous, failing_steps, is_failed):
    saving, state = saver(asynchronous, failing_steps)
    saving._finish(state)
    assert (saving._failure is not None) == is_failed


def test_failed_save_without_fsdp_is_not_completed_even_if_it_cannot_be_deleted(tmp_path, monkeypatch):
    saving = ShardedCheckpointCallback(signals=False)
    saving._is_completing = True
    (tmp_path / "checkpoint-4").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)  # as on NFS, while a file is open
    state = TrainerState(global_step=4, best_model_checkpoint=str(tmp_path / "checkpoint-4"))
    run = arguments(tmp_path), state
    saving.end_save(*run, OSError(28, "No space left on device"), str(tmp_path / "checkpoint-2"))
    saving.on_save(*run, TrainerControl())
    saving.on_step_begin(*run, TrainerControl(), model=None)
    assert list((tmp_path / "checkpoint-4").iterdir()) == []
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    saving.end_save(*run, None, None)
    saving.on_save(*run, TrainerControl())
    assert saving._has_saved


def test_arguments_that_a_run_changes_are_restored_once():
    saving = ShardedCheckpointCallback(signals=False)
    args = SimpleNamespace(save_strategy="best", save_total_limit=2)
    saving._schedule, saving._save_total_limit = SaveSchedule(args, last_saved_step=0), 2
    args.save_total_limit = None
    saving._restore_arguments(args)
    assert (args.save_strategy, args.save_total_limit) == ("best", 2)
    args.save_strategy, args.save_total_limit = "steps", None  # the user's own changes
    saving._restore_arguments(args)
    assert (args.save_strategy, args.save_total_limit) == ("steps", None)


def test_gradient_scaler_of_fp16_is_saved_and_needed_to_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(small_files.resume, "train_params", lambda *arguments: {})
    scheduler = SimpleNamespace(state_dict=dict)
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0)):
        event = {"optimizer": SimpleNamespace(scaler=scaler), "lr_scheduler": scheduler, "model": None}
        files = small_files.collect(None, TrainerState(), event, {}, {}, {})
        assert ("scaler.pt" in files) == (scaler is not None)
    (tmp_path / "scaler.pt").write_bytes(files["scaler.pt"])
    assert torch.load(tmp_path / "scaler.pt")["scale"] == 8.0
    resume._check_scaler(SimpleNamespace(accelerator=SimpleNamespace(scaler=scaler)), tmp_path)
    with pytest.raises(CheckpointError, match="was trained in fp16 and holds a gradient scaler"):
        resume._check_scaler(SimpleNamespace(accelerator=SimpleNamespace(scaler=None)), tmp_path)
