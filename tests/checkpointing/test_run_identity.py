"""Two runs in one output directory: neither deletes nor resumes what the other wrote."""

import errno
import json
import re

import pytest
from transformers import TrainerState

from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.lock import lock_directory
from hf_fsdp_recipes.checkpointing.run_identity import STATE_KEY, claim_directory, read_run
from hf_fsdp_recipes.errors import CheckpointError


def make(directory, step, run):
    incomplete = layout.start(directory, step)
    (incomplete / "a.bin").write_bytes(b"weights")
    final = layout.directory_for(directory, step)
    layout.commit(incomplete, final, layout.manifest_entries(incomplete, ["a.bin"]), {"step": step, "run": run})
    return final


def state_at(step, run):
    return TrainerState(global_step=step, stateful_callbacks={STATE_KEY: {"run": run}} if run else {})


def names(directory):
    return {path.name for path in directory.iterdir()}


def test_new_runs_get_different_ids(tmp_path):
    states = [TrainerState(), TrainerState()]
    for state in states:
        claim_directory(tmp_path, state, "refuse")
    assert read_run(states[0]) != read_run(states[1])
    assert len(read_run(states[0])) == 16


@pytest.mark.parametrize("run", ["earlier", None])
def test_new_run_refuses_the_checkpoints_of_another(tmp_path, run):
    make(tmp_path, 100, run)
    with pytest.raises(CheckpointError, match=r"holds checkpoint-100 of another run.*auto.*previous_run.*previous-1"):
        claim_directory(tmp_path, TrainerState(), "refuse")
    assert names(tmp_path) == {"checkpoint-100"}


def test_archive_moves_only_what_a_run_writes(tmp_path):
    make(tmp_path, 100, "earlier")
    for name in ("export", "export-1", "export_merged", "exports", "export-mine"):
        (tmp_path / name).mkdir()
    for name in ("metrics.jsonl", "report.md", "loss.png", "model.txt", "notes.md", "mine.png"):
        (tmp_path / name).write_text("earlier")
    claim_directory(tmp_path, TrainerState(), "archive")
    assert names(tmp_path) == {"previous-1", "notes.md", "mine.png", "exports", "export-mine"}
    assert names(tmp_path / "previous-1") == {
        "checkpoint-100", "export", "export-1", "export_merged", "metrics.jsonl", "report.md", "loss.png", "model.txt"
    }  # fmt: skip
    make(tmp_path, 1, "later")
    claim_directory(tmp_path, TrainerState(), "archive")
    assert names(tmp_path / "previous-2") == {"checkpoint-1"}


def test_export_alone_is_not_replaced_by_a_new_run(tmp_path):
    (tmp_path / "export").mkdir()
    with pytest.raises(CheckpointError, match=re.escape("holds export of another run. Set previous_run")):
        claim_directory(tmp_path, TrainerState(), "refuse")


def make_stock(directory, step, run=None):
    """Write a checkpoint without a manifest: a stock Trainer's, or one of `run` whose save was interrupted."""
    checkpoint = layout.directory_for(directory, step)
    checkpoint.mkdir()
    callbacks = {STATE_KEY: {"run": run}} if run else {}
    (checkpoint / layout.STATE_FILE).write_text(json.dumps({"global_step": step, "stateful_callbacks": callbacks}))
    return checkpoint


def test_checkpoint_of_a_stock_trainer_belongs_to_another_run(tmp_path):
    make_stock(tmp_path, 100)
    for state in (TrainerState(), state_at(10, "mine")):
        with pytest.raises(CheckpointError, match=r"checkpoint-100 of another run.*resume_from_checkpoint=/.*-100"):
            claim_directory(tmp_path, state, "refuse")
    claim_directory(tmp_path, state_at(100, None), "refuse")  # a run that resumes from it
    claim_directory(tmp_path, TrainerState(), "archive")
    assert names(tmp_path / "previous-1") == {"checkpoint-100"}


def test_interrupted_checkpoints_of_the_same_run_do_not_stop_it(tmp_path):
    make(tmp_path, 10, "mine")
    make_stock(tmp_path, 20, "mine")
    (tmp_path / "checkpoint-30").mkdir()  # without a state file, so of an unknown run
    claim_directory(tmp_path, state_at(10, "mine"), "refuse", is_starting=False)
    assert names(tmp_path) == {"checkpoint-10", "checkpoint-20", "checkpoint-30"}
    claim_directory(tmp_path, state_at(10, "mine"), "refuse")  # otherwise Trainer would write into the leftovers
    assert names(tmp_path) == {"checkpoint-10", "checkpoint-20.set-aside-0", "checkpoint-30.set-aside-0"}


def test_interrupted_saves_are_deleted_and_links_to_them_only_unlinked(tmp_path):
    layout.start(tmp_path, 5)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".checkpoint-6.incomplete").symlink_to(tmp_path / "elsewhere")
    layout.remove_interrupted(tmp_path)
    assert names(tmp_path) == {"elsewhere"}


def test_leftovers_of_a_run_without_a_checkpoint_do_not_stop_a_new_one(tmp_path):
    layout.start(tmp_path, 5)
    (tmp_path / "metrics.jsonl").write_text("{}")
    claim_directory(tmp_path, TrainerState(), "refuse")
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("run", ["mine", None])
def test_resumed_run_keeps_its_id_and_sets_the_abandoned_branch_aside(tmp_path, run):
    for step in (10, 20, 30):
        make(tmp_path, step, run)
    (tmp_path / "export").mkdir()
    state = state_at(20, run)
    claim_directory(tmp_path, state, "refuse")
    assert read_run(state) == run
    assert names(tmp_path) == {"checkpoint-10", "checkpoint-20", "checkpoint-30.set-aside-0", "export"}


def test_resumed_run_refuses_or_archives_the_checkpoints_of_another(tmp_path):
    make(tmp_path, 10, "mine")
    make(tmp_path, 100, "other")
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(CheckpointError, match="holds checkpoint-100"):
        claim_directory(tmp_path, state_at(10, "mine"), "refuse")
    claim_directory(tmp_path, state_at(10, "mine"), "archive")
    assert names(tmp_path) == {"checkpoint-10", "metrics.jsonl", "previous-1"}


def test_newer_checkpoints_remain_until_training_starts(tmp_path):
    """The run may still be refused, and then `auto` must find the newer checkpoints."""
    for step in (10, 20):
        make(tmp_path, step, "mine")
    claim_directory(tmp_path, state_at(10, "mine"), "refuse", is_starting=False)
    assert names(tmp_path) == {"checkpoint-10", "checkpoint-20"}


def test_run_resumed_from_another_directory_does_not_replace_the_export_there(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "metrics.jsonl").write_text("theirs")
    with pytest.raises(CheckpointError, match="holds export of another run"):
        claim_directory(tmp_path, state_at(10, "mine"), "refuse")
    claim_directory(tmp_path, state_at(10, "mine"), "archive")
    assert names(tmp_path / "previous-1") == {"export", "metrics.jsonl"}


def test_run_that_starts_again_in_one_process_sets_its_own_checkpoints_aside(tmp_path):
    make(tmp_path, 10, "mine")
    state = TrainerState()
    claim_directory(tmp_path, state, "refuse", run="mine")
    assert read_run(state) == "mine"
    assert names(tmp_path) == {"checkpoint-10.set-aside-0"}


def test_retention_counts_and_deletes_one_run_only(tmp_path):
    other = [make(tmp_path, step, "other") for step in (1, 100)]
    for step in (10, 20, 30):
        make(tmp_path, step, "mine")
    removed = layout.remove_old(tmp_path, keep=2, run="mine")
    assert [path.name for path in removed] == ["checkpoint-10"]
    assert all(path.is_dir() for path in other)


def test_process_can_lock_its_directory_twice(tmp_path):
    first = lock_directory(tmp_path)
    second = lock_directory(tmp_path, wait_seconds=0)
    second.release()
    assert first.is_locked
    first.release()
    assert not first.is_locked


def test_output_directory_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, sentence in {
        "file": "is a file. Choose another output_dir.",
        "file/run": "is a file. Choose another output_dir.",
        "link": "nowhere, which does not exist",
        "link/run": "nowhere, which does not exist",
    }.items():
        with pytest.raises(CheckpointError, match=re.escape(sentence)):
            lock_directory(tmp_path / path)
    for number, sentence in {
        errno.ENOSPC: "no space left",
        errno.EACCES: "cannot be written: Permission denied",
    }.items():

        def fail(*args, number=number, **kwargs):
            raise OSError(number, "Permission denied")

        monkeypatch.setattr("os.open", fail)
        with pytest.raises(CheckpointError, match=sentence):
            lock_directory(tmp_path / "run")
    monkeypatch.undo()
    lock_directory(tmp_path / "run", wait_seconds=0).release()  # a failed attempt leaves no lock
