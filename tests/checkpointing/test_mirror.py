"""The mirror's rules, in one process: what it refuses, uploads, skips, keeps and downloads."""

import json
import logging
import threading

import pytest

from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing import storage as storage_module
from hf_fsdp_recipes.checkpointing.download import fetch_checkpoint
from hf_fsdp_recipes.checkpointing.mirror import Mirror
from hf_fsdp_recipes.checkpointing.storage import Storage
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.loading.export_marker import MARKER
from tests.checkpointing.object_storage import BUCKET


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(storage_module, "RETRY_SECONDS", (0.01, 0.01))


def make_checkpoint(output, step, run="mine", size=1000):
    incomplete = layout.start(output, step)
    for name in ("optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "scheduler.pt"):
        (incomplete / name).parent.mkdir(exist_ok=True)
        (incomplete / name).write_bytes(f"{name} {step}".encode() * size)
    files = layout.manifest_entries(incomplete, layout.files_in(incomplete))
    layout.commit(incomplete, layout.directory_for(output, step), files, {"step": step, "run": run})
    return layout.directory_for(output, step)


def make_export(directory):
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / MARKER).write_text(json.dumps({"format": 1}))
    return directory


def start_mirror(url, output, run="mine", step=0, keep=None, best=None):
    started = Mirror(str(url))
    started.check(output)
    started.claim(run, step)
    started.start(str(output), step, keep, lambda: best)
    return started


def files_of(checkpoint):
    return {name: (checkpoint / name).read_bytes() for name in [*layout.files_in(checkpoint), layout.MANIFEST]}


@pytest.mark.parametrize("kind", ["s3", "path", "file"])
def test_upload_retention_and_download(storage, tmp_path, kind):
    url = {"s3": f"s3://{BUCKET}/run", "path": str(tmp_path / "mount"), "file": f"file://{tmp_path}/mount"}[kind]
    output = tmp_path / "run"
    own = start_mirror(url, output, keep=2, best=str(output / "checkpoint-1"))
    for step in (1, 2, 3, 20):
        own.add(make_checkpoint(output, step))
        assert own.wait() is None
    listed = Storage(url).list_checkpoints()
    assert [one.step for one in listed if one.is_complete] == [1, 20]
    # SeaweedFS lists emptied directories for some time, so compare files.
    files = storage.keys("run/") if kind == "s3" else [f"{path.name}/" for path in (tmp_path / "mount").iterdir()]
    assert {file.partition("/")[0] for file in files} == {"checkpoint-1", "checkpoint-20"}
    fetched = fetch_checkpoint(f"{url}/auto", tmp_path / "other")
    assert fetched == tmp_path / "other" / "checkpoint-20"
    assert files_of(fetched) == files_of(output / "checkpoint-20")
    assert fetch_checkpoint(f"{url}/checkpoint-1", tmp_path / "other").name == "checkpoint-1"
    assert not list((tmp_path / "other").glob(".*")) and fetch_checkpoint(f"{url}/none/auto", tmp_path) is None
    with pytest.raises(CheckpointError, match="checkpoint-2 is not a complete checkpoint"):
        fetch_checkpoint(f"{url}/checkpoint-2", tmp_path / "other")


def test_auto_takes_the_newer_of_disk_and_mirror(storage, tmp_path):
    url, output, other = f"s3://{BUCKET}/run", tmp_path / "run", tmp_path / "other"
    own = start_mirror(url, output)
    own.add(make_checkpoint(output, 2))
    assert own.wait() is None
    older, newer = make_checkpoint(other, 1), make_checkpoint(other, 3)
    assert fetch_checkpoint(url, other, newer) == newer
    assert fetch_checkpoint(url, other, older) == other / "checkpoint-2"
    foreign = make_checkpoint(tmp_path / "foreign", 1, run="theirs")
    assert fetch_checkpoint(url, tmp_path / "foreign", foreign) == foreign


def test_damaged_copy_on_disk_is_replaced_and_damaged_copy_in_the_mirror_refused(storage, tmp_path, caplog):
    url, output = f"s3://{BUCKET}/run", tmp_path / "run"
    own = start_mirror(url, output)
    checkpoint = make_checkpoint(output, 2)
    own.add(checkpoint)
    assert own.wait() is None
    before = files_of(checkpoint)
    (checkpoint / "scheduler.pt").write_bytes(b"x" * len(before["scheduler.pt"]))
    assert files_of(fetch_checkpoint(url, output)) == before
    storage.client.put_object(Bucket=BUCKET, Key="run/checkpoint-2/scheduler.pt", Body=b"x")
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-2 cannot be resumed from: scheduler\.pt has changed",
    ):
        fetch_checkpoint(url, tmp_path / "other")
    assert not list((tmp_path / "other").glob("checkpoint-*"))


def test_another_runs_checkpoints_are_refused_and_never_deleted(storage, tmp_path):
    url = f"s3://{BUCKET}/run"
    theirs = start_mirror(url, tmp_path / "a", run="theirs")
    theirs.add(make_checkpoint(tmp_path / "a", 2, run="theirs"))
    assert theirs.wait() is None
    with pytest.raises(CheckpointError, match=rf"{url} holds checkpoint-2 of another run\. Resume that run"):
        start_mirror(url, tmp_path / "b")
    own = Mirror(url)  # started at the same time as the other run
    own.check(tmp_path / "b")
    own._run = "mine"
    own.start(str(tmp_path / "b"), 0, 1, lambda: None)
    own.add(make_checkpoint(tmp_path / "b", 2))
    assert "holds checkpoint-2 of another run" in str(own.wait())
    own.add(make_checkpoint(tmp_path / "b", 3))
    assert own.wait() is None
    assert storage.complete("run/") == ["checkpoint-2", "checkpoint-3"]


def test_repeated_steps_are_set_aside_and_interrupted_uploads_deleted(storage, tmp_path):
    url, output = f"s3://{BUCKET}/run", tmp_path / "run"
    first = start_mirror(url, output)
    for step in (1, 2, 3):
        first.add(make_checkpoint(output, step))
        assert first.wait() is None
    storage.client.put_object(Bucket=BUCKET, Key="run/checkpoint-4/upload.json", Body=b'{"run": "mine"}')
    storage.client.put_object(Bucket=BUCKET, Key="run/checkpoint-5/upload.json", Body=b'{"run": "theirs"}')
    resumed = start_mirror(url, output, step=2)
    assert resumed.wait() is None
    assert storage.complete("run/") == ["checkpoint-1", "checkpoint-2"]
    assert "checkpoint-3/manifest.json.set-aside" in storage.keys("run/")
    resumed.add(make_checkpoint(output, 6))
    assert resumed.wait() is None
    assert [key for key in storage.keys("run/") if key.endswith("upload.json")] == ["checkpoint-5/upload.json"]


def test_resumed_checkpoint_is_uploaded_if_it_was_not(storage, tmp_path):
    make_checkpoint(tmp_path, 2)
    assert start_mirror(f"s3://{BUCKET}/run", tmp_path, step=2).wait() is None
    assert storage.complete("run/") == ["checkpoint-2"]


def test_slow_uploads_skip_to_the_newest_checkpoint(storage, tmp_path, monkeypatch, caplog):
    may_go_on, has_begun = threading.Event(), threading.Event()
    put = Mirror._put

    def slow(self, directory, name):
        has_begun.set()
        may_go_on.wait(30)
        put(self, directory, name)

    monkeypatch.setattr(Mirror, "_put", slow)
    own = start_mirror(f"s3://{BUCKET}/run", tmp_path)
    with caplog.at_level(logging.WARNING):
        own.add(make_checkpoint(tmp_path, 1))
        assert has_begun.wait(30)
        for step in (2, 3, 4):
            own.add(make_checkpoint(tmp_path, step))
        assert {path.rpartition("/")[2] for path in own.sources} == {"checkpoint-1", "checkpoint-4"}
        may_go_on.set()
        assert own.wait() is None
    assert storage.complete("run/") == ["checkpoint-1", "checkpoint-4"]
    assert own.sources == [] and caplog.text.count("slower than saves") == 1


def test_failed_upload_is_retried_then_reported(storage, tmp_path, caplog):
    own = start_mirror(f"s3://{BUCKET}/run", tmp_path)
    attempts = []
    put_file = own._storage.fs.put_file

    def fail_twice(*arguments):
        attempts.append(arguments)
        if len(attempts) < 3:
            raise OSError(5, "Input/output error")
        put_file(*arguments)

    own._storage.fs.put_file = fail_twice
    own.add(make_checkpoint(tmp_path, 1))
    assert own.wait() is None and len(attempts) == 3 + 3  # four files, one of them three times
    storage.stop()
    own.add(make_checkpoint(tmp_path, 2))
    failure = str(own.wait())
    assert f"checkpoint-2 was not uploaded to s3://{BUCKET}/run: " in failure and "connect" in failure
    assert failure in caplog.text


def test_an_export_does_not_make_up_for_another_whose_upload_failed(tmp_path, monkeypatch):
    own = start_mirror(tmp_path / "mount", tmp_path)
    put, is_down = own._put, True

    def put_unless_down(directory, name):
        if is_down:
            raise OSError(5, "Input/output error")
        put(directory, name)

    monkeypatch.setattr(own, "_put", put_unless_down)
    adapter, merged = make_export(tmp_path / "export"), make_export(tmp_path / "export_merged")
    own.add(adapter, MARKER)
    assert "export was not uploaded" in str(own.wait())
    is_down = False
    own.add(merged, MARKER)
    assert f"{adapter} was not uploaded" in str(own.wait())
    own.add(adapter, MARKER)
    assert own.wait() is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s3://nowhere/run",
            r"s3://nowhere/run cannot be written: (The specified bucket does not exist|Access Denied)\. Check the",
        ),
        ("nothing://bucket/run", "nothing://bucket/run cannot be opened: Protocol not known: nothing. For s3, run"),
        ("gs://bucket/run", r"gs://bucket/run cannot be opened: .*gcsfs.*"),
        ("/proc/nothing/run", "/proc/nothing/run cannot be written: "),
        ("OUTPUT", "checkpoint_mirror and output_dir are both "),
    ],
)
def test_mirror_is_checked_before_training(storage, tmp_path, url, message):
    with pytest.raises(CheckpointError, match=message):
        Mirror(url.replace("OUTPUT", str(tmp_path))).check(tmp_path)


def test_mirror_needs_fsdp_and_names_files_inside_only(storage, tmp_path):
    with pytest.raises(CheckpointError, match="checkpoint_mirror needs FSDP"):
        Mirror(f"s3://{BUCKET}/run").check(tmp_path, is_fsdp=False)
    manifest = {"format": 1, "step": 1, "files": {"../evil": {"bytes": 1, "xxh3": "0"}}}
    storage.client.put_object(Bucket=BUCKET, Key="run/checkpoint-1/manifest.json", Body=json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match="lists files outside the checkpoint"):
        fetch_checkpoint(f"s3://{BUCKET}/run", tmp_path)
