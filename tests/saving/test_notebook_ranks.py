"""A process whose training was interrupted, as in a notebook, can train again."""

import contextlib
import os
import signal

import pytest

from hf_fsdp_recipes import distributed
from tests.saving.runs import (
    before_last_file,
    contents_of,
    describe,
    make_trainer,
    names_in,
    on,
    slow_disk,
    steps_in,
    train,
)


def _interrupt(trainer, error, event, step):
    """Raise an error once, at an event of a step. KeyboardInterrupt stands for Ctrl-C."""
    is_pending = [True]

    def act(*_):
        if trainer.state.global_step == step and is_pending:
            is_pending.clear()
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error("of a row")

    if event == "a save":
        before_last_file(trainer, step, act)
    else:
        on(trainer, event, act)


def _train_until_error(trainer, error):
    """Train until an error. Return what it leaves."""
    received = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    arguments = trainer.args.to_dict()
    with contextlib.suppress(error):
        trainer.train()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    distributed.gather(None)  # then rank 0 has deleted the workspace
    return {
        "names": names_in(trainer.args.output_dir),
        "steps": steps_in(trainer.args.output_dir),
        "has same arguments": trainer.args.to_dict() == arguments,
        "received": received,
    }


def _make(output):
    from hf_fsdp_recipes import ShardedCheckpointCallback

    return make_trainer(output, [ShardedCheckpointCallback()], save_total_limit=3)


def _resume_after_error(output, error, event, step, is_same_trainer=False):
    """Train until an error, and resume in the same process.

    Return what the error left, what came of the run, and what an uninterrupted run gives.
    """
    from hf_fsdp_recipes import latest_checkpoint

    whole = train(output / "stock", stock=True, save_total_limit=3)
    slow_disk()
    first = _make(output / "ours")
    _interrupt(first, error, event, step)
    left = _train_until_error(first, error)
    second = first if is_same_trainer else _make(output / "ours")
    second.train(resume_from_checkpoint=latest_checkpoint(output / "ours"))
    return left, describe(second), {key: whole[key] for key in describe(second)}


@pytest.mark.parametrize(
    ("world", "world_size", "error", "event", "step", "saved"),
    [
        ("fsdp", 2, ValueError, "on_step_begin", 3, [[2]]),
        ("fsdp", 1, KeyboardInterrupt, "on_step_begin", 3, [[2]]),
        ("ddp", 2, ValueError, "on_step_begin", 3, [[2]]),
        ("one", 1, KeyboardInterrupt, "on_step_begin", 3, [[2]]),
        ("fsdp", 1, KeyboardInterrupt, "a save", 4, [[2]]),
        ("one", 1, KeyboardInterrupt, "a save", 4, [[2]]),
        ("fsdp", 1, ValueError, "on_save", 4, [[2], [2, 4]]),
        ("one", 1, KeyboardInterrupt, "on_save", 4, [[2], [2, 4]]),
        ("fsdp", 1, ValueError, "on_train_end", 4, [[2, 4]]),
    ],
)
def test_after_an_error_the_process_is_as_before_and_the_run_can_be_resumed_in_it(
    run, tmp_path, world, world_size, error, event, step, saved
):
    options = {"function": _resume_after_error, "error": error, "event": event, "step": step}
    options["is_same_trainer"] = event == "on_step_begin" and world_size == 1
    for left, resumed, whole in run(tmp_path, world_size, world=world, **options):
        assert left["steps"] in saved
        assert left["names"] == [f"checkpoint-{step}" for step in left["steps"]]
        assert left["has same arguments"]
        assert left["received"] == [signal.SIGTERM, signal.SIGUSR1]
        assert resumed == whole
    assert steps_in(tmp_path / "ours") == [2, 4]
    assert names_in(tmp_path / "ours") == ["checkpoint-2", "checkpoint-4"]


def _start_again_after_error(output, step):
    """Train until an error, and start at step 0 with the same trainer.

    Return the checkpoints that the error left, the error of the second start, and whether it left
    the directory as it was.
    """
    from hf_fsdp_recipes.errors import CheckpointError

    slow_disk()
    trainer = _make(output)
    _interrupt(trainer, ValueError, "on_step_begin", step)
    left = _train_until_error(trainer, ValueError)
    before = contents_of(output)
    error = None
    try:
        trainer.train()
    except CheckpointError as found:
        error = str(found)
    return left["steps"], error, contents_of(output) == before


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_after_an_error_a_start_at_step_0_does_not_take_the_checkpoint(run, tmp_path, world):
    options = {"function": _start_again_after_error, "step": 3}
    ((left, error, is_untouched),) = run(tmp_path, 1, world=world, **options)
    assert left == [2] and is_untouched
    assert error.startswith(f"{tmp_path} holds checkpoint-2 of an earlier run. Resume it")


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_after_an_error_before_the_first_save_the_same_trainer_starts_at_step_0(
    run, tmp_path, world
):
    options = {"function": _start_again_after_error, "step": 1}
    ((left, error, _),) = run(tmp_path, 1, world=world, **options)
    assert left == [] and error is None
    assert steps_in(tmp_path) == [2, 4] and names_in(tmp_path) == ["checkpoint-2", "checkpoint-4"]
