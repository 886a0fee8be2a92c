"""A save that fails leaves no trace and does not stop training.

Only the last one's failure is an error, on every rank.
"""

import errno
import fcntl
import functools
import json
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_fsdp_recipes.saving.directory import OutputDirectory
from tests.saving.runs import (
    BEST,
    before_last_file,
    before_writing,
    names_in,
    on,
    rank,
    steps_in,
)


def _fail():
    raise OSError(errno.ENOSPC, "No space left on device")


def _wait_for_save(trainer):
    save = trainer.callback_handler.callbacks[-1]._save
    while save is not None and not save.ended.done():
        time.sleep(0.01)


def _fill_disk_at_step_4(trainer):
    filler = Path(trainer.args.output_dir).with_name("filler")

    def fill_or_free(state, control):
        _wait_for_save(trainer)
        if rank() == 0 and state.global_step == 4:
            status = os.statvfs(filler.parent)
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_bsize - 60_000)
        if state.global_step == 5:
            filler.unlink(missing_ok=True)

    on(trainer, "on_step_end", fill_or_free)


def test_on_a_full_disk_training_continues_and_the_next_save_works(run, mount, tmp_path):
    mount(tmp_path, 4 << 20)
    result = run(tmp_path / "run", max_steps=6, prepare=_fill_disk_at_step_4)[0]
    assert steps_in(tmp_path / "run") == [2, 6] and [path.name for path in tmp_path.iterdir()] == [
        "run"
    ]
    assert len(result["losses"]) == 6 and result["error"] is None
    assert len([text for text in result["warnings"] if "checkpoint-4 was not saved" in text]) == 1


def _fail_on_rank_1_at_step_4(trainer):
    if rank() == 1:
        before_writing("checkpoint-4", _fail)


def _fail_and_note_best(trainer):
    _fail_on_rank_1_at_step_4(trainer)
    trainer.compute_metrics = lambda _: {"score": {2: 3, 4: 1, 6: 2}[trainer.state.global_step]}
    on(trainer, "on_step_end", lambda state, control: _wait_for_save(trainer))
    on(
        trainer,
        "on_evaluate",
        lambda state, control: trainer.notes.append((state.best_metric, state.best_global_step)),
    )


def test_after_a_failed_save_all_ranks_return_to_the_best_model_that_is_saved(run, tmp_path):
    for result in run(tmp_path, max_steps=6, prepare=_fail_and_note_best, **BEST):
        # Before the evaluations of steps 2, 4 and 6.
        assert result["notes"] == [(None, None), (3, 2), (3, 2)]
        assert result["best"] == (2, 6, str(tmp_path / "checkpoint-6")) and result["error"] is None
    assert steps_in(tmp_path) == [2, 6]


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_last_failed_save_is_an_error_on_every_rank_after_the_export(
    run, tmp_path, asynchronous
):
    callback = {"export_dir": tmp_path / "export", "asynchronous": asynchronous}
    for result in run(tmp_path / "run", prepare=_fail_on_rank_1_at_step_4, callback=callback):
        assert (
            result["error"].startswith("the last checkpoint was not saved")
            and "No space left" in result["error"]
        )
    assert steps_in(tmp_path / "run") == [2] and [
        path.name for path in (tmp_path / "run").iterdir()
    ] == ["checkpoint-2"]
    assert (tmp_path / "export" / "model.safetensors").is_file()


def _fail_to_write_random_state(trainer):
    save = trainer._save_rng_state
    trainer._save_rng_state = lambda output: (
        _fail() if rank() == 1 and "checkpoint-2" in output else save(output)
    )


def test_a_failure_in_trainers_own_files_on_one_rank_fails_the_save_on_all(run, tmp_path):
    results = run(tmp_path, prepare=_fail_to_write_random_state)
    assert steps_in(tmp_path) == [4] and "No space left" in results[0]["warnings"][0]


def _spoil_weights_at_step_3(trainer):
    def spoil(state, control):
        if state.global_step == 3 and rank() == trainer.args.world_size - 1:
            weight = next(trainer.model.parameters()).data
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local[0] = float("nan")

    on(trainer, "on_step_end", spoil)


WORLDS = pytest.mark.parametrize("world", ["fsdp", "ddp", "one"])


@WORLDS
def test_weights_with_nan_end_the_run_at_once_and_replace_no_checkpoint(run, tmp_path, world):
    options = {"max_steps": 20, "save_total_limit": 1, "prepare": _spoil_weights_at_step_3}
    results = run(tmp_path, world=world, **options)
    errors = {result["error"] for result in results}
    assert len(errors) == 1 and "model.embed_tokens.weight contains NaN" in errors.pop()
    assert all(result["step"] <= 6 for result in results)
    assert steps_in(tmp_path) == [2] and names_in(tmp_path) == ["checkpoint-2"]


def _fail_on_the_last_rank(trainer, steps):
    if rank() == trainer.args.world_size - 1:
        for step in steps:
            before_last_file(trainer, step, _fail)


@WORLDS
def test_one_failed_save_is_a_warning_and_training_continues(run, tmp_path, world):
    prepare = functools.partial(_fail_on_the_last_rank, steps=[4])
    results = run(tmp_path, world=world, max_steps=6, prepare=prepare)
    assert [result["error"] for result in results] == [None] * len(results)
    assert steps_in(tmp_path) == [2, 6] and names_in(tmp_path) == ["checkpoint-2", "checkpoint-6"]
    (warning,) = results[0]["warnings"]
    assert warning.startswith("checkpoint-4 was not saved") and "No space left" in warning


@WORLDS
def test_two_failed_saves_in_a_row_end_the_run_with_the_reason(run, tmp_path, world):
    prepare = functools.partial(_fail_on_the_last_rank, steps=[4, 6, 8, 10])
    results = run(tmp_path, world=world, max_steps=20, prepare=prepare)
    errors = {result["error"] for result in results}
    assert len(errors) == 1
    assert re.match("training stops.*No space left on device", errors.pop())
    assert all(6 <= result["step"] <= 8 for result in results)
    assert steps_in(tmp_path) == [2] and names_in(tmp_path) == ["checkpoint-2"]


def _have_no_memory(trainer):
    import psutil

    psutil.virtual_memory = lambda: SimpleNamespace(available=0)


def test_without_memory_for_a_copy_all_saves_succeed_and_this_is_said_once(run, tmp_path):
    results = run(tmp_path, prepare=_have_no_memory, save_steps=1)
    assert results[0]["error"] is None and steps_in(tmp_path) == [1, 2, 3, 4]
    assert len(results[0]["warnings"]) == 1


def _sample_without_do_sample(trainer):
    """Have a generation config that transformers loads, but refuses to save."""
    trainer.model.generation_config.temperature = 0.9


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_a_generation_config_that_cannot_be_saved_is_written_as_the_model_came_with_it(
    run, tmp_path, world
):
    options = {
        "world": world,
        "prepare": _sample_without_do_sample,
        "callback": {"export_dir": tmp_path / "export"},
    }
    results = run(tmp_path / "run", **options)
    assert results[0]["error"] is None and results[0]["warnings"] == []
    assert steps_in(tmp_path / "run") == [2, 4]
    for directory in (tmp_path / "run" / "checkpoint-4", tmp_path / "export"):
        written = json.loads((directory / "generation_config.json").read_text())
        assert written["temperature"] == 0.9 and not written.get("do_sample")


def _have_no_locks(trainer):
    fcntl.flock = lambda *arguments: _fail()


def test_a_file_system_without_locks_is_a_warning(run, tmp_path):
    result = run(tmp_path, prepare=_have_no_locks)[0]
    assert steps_in(tmp_path) == [2, 4] and result["error"] is None
    assert len(result["warnings"]) == 1 and "cannot be locked" in result["warnings"][0]


def test_without_locks_another_run_deletes_no_save_in_flight(monkeypatch, tmp_path):
    directory = OutputDirectory(tmp_path)
    directory.open("a run", None, 0)
    directory.begin(2)
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: _fail())
    OutputDirectory(tmp_path).heal()
    assert (tmp_path / "checkpoint-2").is_dir()
    directory.close()


def _write_slowly_on_rank_1(trainer):
    """Write for longer than collectives may take. The other rank waits before its next save."""
    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), dist.group.WORLD)
    if rank() == 1:
        before_writing("checkpoint-2/optimizer_0/__", lambda: time.sleep(10))


@pytest.mark.slow
def test_a_slow_write_on_one_rank_outlasts_the_timeout_of_collectives(run, tmp_path):
    result = run(tmp_path, prepare=_write_slowly_on_rank_1)[0]
    assert steps_in(tmp_path) == [2, 4] and result["error"] is None and not result["warnings"]


def _fail_to_write_the_model(trainer):
    write = trainer._save
    trainer._save = lambda *args, **kwargs: _fail() if rank() == 0 else write(*args, **kwargs)


def test_a_save_that_fails_while_fsdp_gathers_the_state_ends_the_run(run, tmp_path):
    options = {"world": "full state", "prepare": _fail_to_write_the_model, "expect_failure": True}
    errors = run(tmp_path, **options)
    assert ("OSError", "[Errno 28] No space left on device") in errors
    assert steps_in(tmp_path) == []


def _fail_on_one_rank_after_an_evaluation(trainer):
    save = trainer.save_model
    trainer.save_model = lambda output, **options: (
        _fail()
        if rank() == 1 and trainer.state.global_step == 2 and options
        else save(output, **options)
    )


def test_a_save_that_fails_on_one_rank_after_an_evaluation_fails_on_all(run, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2}
    whole = run(tmp_path / "whole", **options)
    results = run(tmp_path / "run", prepare=_fail_on_one_rank_after_an_evaluation, **options)
    assert steps_in(tmp_path / "run") == [4] and "No space left" in results[0]["warnings"][0]
    assert [result["weights"] for result in results] == [result["weights"] for result in whole]


def _fail_and_let_a_callback_write(trainer, is_careful):
    """Fail to save step 2. A callback writes a file, and makes the directory if it is careful."""

    def write(state, control):
        checkpoint = Path(trainer.args.output_dir, f"checkpoint-{state.global_step}")
        if is_careful:
            checkpoint.mkdir(exist_ok=True)
        (checkpoint / "average.bin").write_text("mine")

    on(trainer, "on_save", write)
    save = trainer._save_rng_state
    trainer._save_rng_state = lambda output: (
        _fail() if output.endswith("checkpoint-2") else save(output)
    )


@pytest.mark.parametrize("is_careful", [False, True])
def test_what_a_callback_writes_into_a_failed_save_is_no_checkpoint(run, tmp_path, is_careful):
    prepare = functools.partial(_fail_and_let_a_callback_write, is_careful=is_careful)
    result = run(tmp_path, world="one", prepare=prepare)[0]
    assert result["error"] is None and "No space left" in result["warnings"][0]
    assert steps_in(tmp_path) == [4] and names_in(tmp_path) == ["checkpoint-4"]
    assert (tmp_path / "checkpoint-4" / "average.bin").is_file()
