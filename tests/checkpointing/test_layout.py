"""A checkpoint is complete or does not exist."""

import contextlib
import errno
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from hf_fsdp_recipes.checkpointing import layout, lock
from hf_fsdp_recipes.checkpointing.command import format_table
from hf_fsdp_recipes.checkpointing.lock import lock_directory
from hf_fsdp_recipes.checkpointing.verification import check_named, latest_checkpoint
from hf_fsdp_recipes.errors import CheckpointError, RecipeError


def make(run, step, files=("a.bin", "part/b.bin")):
    incomplete = layout.start(run, step)
    for name in files:
        (incomplete / name).parent.mkdir(exist_ok=True)
        (incomplete / name).write_bytes(f"{step} {name}".encode() * 100)
    final = layout.directory_for(run, step)
    layout.commit(incomplete, final, layout.manifest_entries(incomplete, layout.files_in(incomplete)), {"step": step})
    return final


def test_committed_checkpoint_is_the_latest(tmp_path):
    make(tmp_path, 5)
    newest = make(tmp_path, 10)
    assert latest_checkpoint(tmp_path) == newest
    assert [c.is_complete for c in layout.list_checkpoints(tmp_path, verify=True)] == [True, True]


def test_steps_are_ordered_as_numbers(tmp_path):
    make(tmp_path, 9)
    assert latest_checkpoint(tmp_path) == layout.directory_for(tmp_path, 9)
    assert latest_checkpoint(tmp_path) != make(tmp_path, 10)
    assert latest_checkpoint(tmp_path).name == "checkpoint-10"


def test_unfinished_save_is_not_a_checkpoint(tmp_path):
    kept = make(tmp_path, 5)
    (layout.start(tmp_path, 10) / "a.bin").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == kept


def tear_missing(path):
    (path / "part/b.bin").unlink()


def tear_truncated(path):
    (path / "a.bin").write_bytes(b"x")


def tear_flipped(path):
    data = bytearray((path / "a.bin").read_bytes())
    data[3] ^= 1
    (path / "a.bin").write_bytes(bytes(data))


def tear_manifest(path):
    (path / layout.MANIFEST).unlink()


def tear_manifest_text(path):
    (path / layout.MANIFEST).write_text("{")


def tear_manifest_number(path):
    (path / layout.MANIFEST).write_text('{"step": 10, "files": {"a.bin": {"bytes": 1e999, "xxh3": ""}}}')


def tear_manifest_nesting(path):
    (path / layout.MANIFEST).write_text("[" * 100_000)


def tear_manifest_name(path):
    (path / layout.MANIFEST).write_text(json.dumps({"step": 10, "files": {"a" * 999: {"bytes": 1, "xxh3": ""}}}))


def tear_other_run(path):
    manifest = json.loads((path / layout.MANIFEST).read_text())
    (path / layout.MANIFEST).write_text(json.dumps(manifest | {"step": 7}))


@pytest.mark.parametrize(
    ("tear", "named"),
    [
        (tear_missing, "part/b.bin is missing"),
        (tear_truncated, "a.bin has 1 bytes"),
        (tear_flipped, "a.bin has changed"),
        (tear_manifest, "no manifest.json"),
        (tear_manifest_text, "cannot be read"),
        (tear_manifest_number, "cannot be read"),
        (tear_manifest_nesting, "cannot be read"),
        (tear_manifest_name, "is missing"),
        (tear_other_run, "is for step 7"),
    ],
)
def test_incomplete_checkpoint_is_named_and_skipped(tmp_path, caplog, tear, named):
    kept = make(tmp_path, 5)
    torn = make(tmp_path, 10)
    tear(torn)
    assert latest_checkpoint(tmp_path) == kept
    assert named in caplog.text
    assert torn.is_dir()  # reported, but not deleted


def test_incomplete_checkpoints_are_set_aside_not_deleted(tmp_path):
    torn = make(tmp_path, 10)
    tear_truncated(torn)
    (moved,) = layout.quarantine_incomplete(tmp_path)
    assert (moved / "a.bin").read_bytes() == b"x"
    assert not torn.exists()
    assert layout.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize(("name", "method"), [("a.bin", "stat"), (layout.MANIFEST, "read_text")])
def test_failing_file_system_is_an_error_and_sets_nothing_aside(tmp_path, monkeypatch, number, name, method):
    kept = make(tmp_path, 10)
    original = getattr(Path, method)

    def fail(self, *args, **kwargs):
        if self.name == name:
            raise OSError(number, os.strerror(number), str(self))
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, method, fail)
        for find in (layout.quarantine_incomplete, latest_checkpoint):
            with pytest.raises(CheckpointError, match=rf"{name} cannot be read: {os.strerror(number)}"):
                find(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]
    assert latest_checkpoint(tmp_path) == kept


def test_path_that_cannot_exist_has_no_size(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("none", "file/below", "loop", "x" * 300, "a\0b", ""):
        assert layout.find_size(tmp_path / name) is None


@pytest.mark.parametrize(
    ("facts", "shown"),
    [({"loss": "x"}, "?"), ({"loss": [1]}, "?"), ({"world_size": [2]}, "[2]"), ({"loss": 1}, "1.0000")],
)
def test_table_shows_a_manifest_with_wrong_values(tmp_path, facts, shown):
    manifest = make(tmp_path, 5) / layout.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | facts))
    assert shown in format_table(layout.list_checkpoints(tmp_path)).splitlines()[1]


def test_retention_skips_links(tmp_path, caplog):
    elsewhere = make(tmp_path / "other", 5)
    (tmp_path / "checkpoint-5").symlink_to(elsewhere)
    for step in (10, 15):
        make(tmp_path, step)
    assert [path.name for path in layout.remove_old(tmp_path, keep=1)] == ["checkpoint-10"]
    assert f"symbolic links are not deleted: {tmp_path / 'checkpoint-5'}" in caplog.text
    assert elsewhere.is_dir() and (tmp_path / "checkpoint-5").is_symlink()


def test_retention_keeps_newest_and_protected(tmp_path):
    made = {step: make(tmp_path, step) for step in (5, 10, 15, 20)}
    removed = layout.remove_old(tmp_path, keep=2, protect=[made[5]])
    assert [path.name for path in removed] == ["checkpoint-10", "checkpoint-15"]
    assert layout.remove_old(tmp_path, keep=1, protect=[made[5]]) == []
    assert made[20].is_dir()


def test_retention_touches_only_exact_names(tmp_path):
    for step in (5, 10):
        make(tmp_path, step)
    for name in ("checkpoint-5-mine", "my-checkpoint-5", "checkpoint-abc", "checkpoint-05.bak"):
        (tmp_path / name).mkdir()
    layout.remove_old(tmp_path, keep=1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoint-10", "checkpoint-5-mine", "my-checkpoint-5", "checkpoint-abc", "checkpoint-05.bak"}


def test_retention_does_not_count_incomplete_checkpoints(tmp_path):
    make(tmp_path, 5)
    tear_truncated(make(tmp_path, 10))
    assert layout.remove_old(tmp_path, keep=1) == []


def test_part_of_a_checkpoint_that_was_downloaded_is_resumed_from_and_never_counts(tmp_path):
    part = make(tmp_path, 5).rename(layout.download_directory_for(tmp_path, 5))
    assert layout.list_checkpoints(tmp_path) == [] and latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="is not a complete checkpoint directory"):
        check_named(part)
    layout.remove_interrupted(tmp_path)  # as at the start of training
    assert part.is_dir()
    layout.start(tmp_path, 6)
    assert not part.exists()


def test_existing_directory_of_that_name_is_set_aside(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "precious").write_text("mine")
    make(tmp_path, 5)
    assert latest_checkpoint(tmp_path).name == "checkpoint-5"
    assert (tmp_path / "checkpoint-5.set-aside-0" / "precious").read_text() == "mine"


def test_file_that_vanished_before_the_commit_is_an_error(tmp_path):
    incomplete = layout.start(tmp_path, 5)
    (incomplete / "a.bin").write_bytes(b"x")
    files = layout.manifest_entries(incomplete, ["a.bin"])
    (incomplete / "a.bin").unlink()
    with pytest.raises(CheckpointError, match=r"a\.bin"):
        layout.commit(incomplete, layout.directory_for(tmp_path, 5), files, {"step": 5})
    assert not layout.directory_for(tmp_path, 5).exists()


def _hold(path, ready, release):
    lock_directory(path)
    ready.set()
    release.wait(20)


@contextlib.contextmanager
def other_process(target, path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=target, args=(path, ready, release))
    other.start()
    try:
        assert ready.wait(20)
        yield
    finally:
        release.set()
        other.join(20)


def test_second_run_in_one_directory_is_refused(tmp_path):
    with other_process(_hold, tmp_path), pytest.raises(CheckpointError, match="in use by another run"):
        lock_directory(tmp_path, wait_seconds=0.1)
    lock_directory(tmp_path, wait_seconds=5).release()


def _hold_briefly(path, ready, release):
    lock.STALE_SECONDS = 2
    _hold(path, ready, release)


def test_lock_of_a_dead_node_is_taken_over_and_a_living_run_keeps_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE_SECONDS", 2)
    file = tmp_path / lock.LOCK_FILE
    with other_process(_hold_briefly, tmp_path), pytest.raises(CheckpointError, match="in use by another run"):
        lock_directory(tmp_path, wait_seconds=4)  # its owner updates it, so it is not taken over
    own = lock_directory(tmp_path)
    lock.check_lock(tmp_path)
    dead = file.read_text().replace("host=", "host=node-7-").replace("token=", "token=0")
    file.rename(tmp_path / "own")  # as in a takeover, another file gets the lock's name
    file.write_text(dead)
    with pytest.raises(RecipeError, match=r"was taken over by process \d+ on node-7-.*, because .* This run ends"):
        lock.check_lock(tmp_path)
    time.sleep(2)
    file.unlink()
    with pytest.raises(
        RecipeError, match=r"the lock of .* was lost \(owner-changed\), so"
    ):  # even when its file is gone
        lock.check_lock(tmp_path)
    own.release()
    file.write_text(dead)  # the lock of a node that has died
    started = time.monotonic()
    lock_directory(tmp_path, wait_seconds=10).release()
    assert 2 <= time.monotonic() - started < 8


def test_run_whose_lock_file_was_deleted_is_not_told_of_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE_SECONDS", 1)
    own = lock_directory(tmp_path)
    (tmp_path / lock.LOCK_FILE).unlink()
    deadline = time.monotonic() + 10
    while own.compromise is None and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(RecipeError, match=r"the lock of .* was lost \(marker-missing\), so another run could start"):
        lock.check_lock(tmp_path)
    own.release()


def test_unwritable_directory_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created"):
        layout.start(tmp_path / "file", 5)


@pytest.mark.parametrize("tear", [tear_missing, tear_truncated, tear_flipped, tear_other_run])
def test_incomplete_checkpoint_named_to_resume_from_is_refused(tmp_path, tear):
    torn = make(tmp_path, 10)
    tear(torn)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        check_named(torn)


def test_checkpoint_without_a_manifest_is_accepted_with_a_warning(tmp_path, caplog):
    (tmp_path / "checkpoint-5").mkdir()
    check_named(tmp_path / "checkpoint-5")
    assert "no manifest.json" in caplog.text
    assert layout.quarantine_incomplete(tmp_path) == []
