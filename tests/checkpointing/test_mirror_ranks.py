"""Runs with a mirror: uploads next to training, kills in the middle of an upload, and downloads to empty disks."""

import logging
import os
import shutil
import signal
import threading
import time

import pytest

from hf_fsdp_recipes.checkpointing import layout
from tests.checkpointing.object_storage import BUCKET
from tests.checkpointing.test_mirror import files_of, make_checkpoint
from tests.ranks.harness import run_ranks, start_ranks, template_environment
from tests.recipes.launching import run_recipe
from tests.recipes.test_sft import CPU, recipe

PREEMPTED = ("SystemExit", "85")
FAILED = ("SystemExit", "1")


def _run(arguments, hooks=None, log=None):
    """Run the recipe; `hooks` has functions to call at the start of a step (key: step) or after an upload (key: directory)."""
    from hf_fsdp_recipes.callback import ShardedCheckpointCallback
    from hf_fsdp_recipes.checkpointing import mirror, storage

    hooks = hooks or {}
    storage.RETRY_SECONDS = (0.01,)
    put, begin = mirror.Mirror._put, ShardedCheckpointCallback.on_step_begin

    def hooked_put(self, directory, name):
        put(self, directory, name)
        hooks.get(directory.name, time.time)()

    def hooked_begin(self, args, state, control, **kwargs):
        hooks.get(state.global_step, time.time)()
        return begin(self, args, state, control, **kwargs)

    mirror.Mirror._put, ShardedCheckpointCallback.on_step_begin = hooked_put, hooked_begin
    if log is not None:
        logging.getLogger("hf_fsdp_recipes").addHandler(logging.FileHandler(log))
    run_recipe(arguments)


def _run_until_uploading(arguments):
    _run(arguments, {"checkpoint-4": lambda: time.sleep(600)})


def _run_until_stopped(arguments, flag, log):
    def wait():
        while not flag.exists():
            time.sleep(0.02)

    _run(arguments, {3: wait}, log)


def _run_until_signaled(arguments):
    uploads = {"checkpoint-4": lambda: time.sleep(0.2)}
    _run(arguments, uploads | {3: lambda: os.kill(os.getpid(), signal.SIGTERM)})


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def weights(output):
    """Return the export's weights and the checksums of the last checkpoint's tensors."""
    files = layout.read_manifest(output / "checkpoint-6")["files"]
    checksums = {name: entry for name, entry in files.items() if name.endswith(".distcp")}
    return (output / "export" / "model.safetensors").read_bytes(), checksums


def test_killed_while_uploading_resumes_from_the_mirror_on_an_empty_disk(tiny_model, text_file, tmp_path, storage):
    environment = template_environment(CPU) | storage.environment
    settings = {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file, "save_total_limit": 1}
    config = recipe(tmp_path, **settings, report=False)
    whole = ["--config", config, "--output_dir", tmp_path / "whole"]
    run_ranks(_run, 2, whole, environment=environment, timeout_seconds=200)

    command = ["--config", config, "--checkpoint_mirror", f"s3://{BUCKET}/run", "--resume_from_checkpoint", "auto"]
    processes, _results = start_ranks(_run_until_uploading, 2, command, environment=environment)
    try:
        wait_for(lambda: len(storage.keys("run/checkpoint-4/")) >= 3)  # a file of each rank, and the mark "unfinished"
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert storage.complete("run/") == ["checkpoint-2"]
    shutil.rmtree(tmp_path / "run")
    run_ranks(_run, 2, command, environment=environment, timeout_seconds=200)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert storage.complete("run/") == ["checkpoint-6"]
    assert {key.partition("/")[0] for key in storage.keys("run/")} == {"checkpoint-6", "export"}
    export = {path.name: path.read_bytes() for path in (tmp_path / "run" / "export").iterdir()}
    assert {name: storage.read(f"run/export/{name}") for name in storage.keys("run/export/")} == export


@pytest.mark.slow
def test_server_that_stops_causes_warnings_and_a_failed_run_after_the_export(tiny_model, text_file, tmp_path, storage):
    settings = {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file}
    config = recipe(tmp_path, checkpoint_mirror=f"s3://{BUCKET}/run", **settings)

    def stop_server():
        wait_for(lambda: "checkpoint-2/manifest.json" in storage.keys("run/"))
        storage.stop()
        (tmp_path / "stopped").touch()

    stopper = threading.Thread(target=stop_server)
    stopper.start()
    errors = run_ranks(
        _run_until_stopped, 2, ["--config", config], tmp_path / "stopped", tmp_path / "log",
        environment=template_environment(CPU) | storage.environment, expect_failure=True, timeout_seconds=200,
    )  # fmt: skip
    stopper.join()
    assert errors == [FAILED, FAILED]
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert layout.validate(tmp_path / "run" / "checkpoint-6", verify=True) is None
    assert f"checkpoint-6 was not uploaded to s3://{BUCKET}/run: " in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_signaled_run_uploads_before_it_exits_and_resumes_from_a_path(tiny_model, text_file, tmp_path):
    settings = {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file}
    config = recipe(tmp_path, checkpoint_mirror=tmp_path / "mount", **settings)
    command = ["--config", config]
    errors = run_ranks(
        _run_until_signaled, 2, command, environment=template_environment(CPU), expect_failure=True, timeout_seconds=200
    )
    assert errors == [PREEMPTED, PREEMPTED]
    assert layout.validate(tmp_path / "mount" / "checkpoint-4", verify=True) is None
    shutil.rmtree(tmp_path / "run")
    command += ["--resume_from_checkpoint", str(tmp_path / "mount" / "auto")]
    run_ranks(_run, 2, command, environment=template_environment(CPU), timeout_seconds=200)
    assert layout.validate(tmp_path / "mount" / "checkpoint-6", verify=True) is None
    assert (tmp_path / "mount" / "export" / "model.safetensors").is_file()


def _exchange(url, output, is_shared):
    """Upload rank 0's checkpoint and download it; return this rank's numbers of uploaded and downloaded files."""
    import torch.distributed as dist

    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.checkpointing import download, mirror, storage

    dist.init_process_group("gloo")
    if not is_shared:
        distributed.node_id = lambda: str(dist.get_rank())
    own = output if is_shared else output / f"node-{dist.get_rank()}"
    calls, attempt = [], storage.Storage.attempt

    def count(self, method, *arguments, **keywords):
        calls.append(method)
        return attempt(self, method, *arguments, **keywords)

    storage.Storage.attempt = count
    uploads = mirror.Mirror(url)
    uploads.check(own)
    if dist.get_rank() == 0:
        uploads.claim("mine", 0)
        make_checkpoint(own / "saved", 7)
    dist.barrier()
    uploads.start(str(own), 0, None, lambda: None)
    uploads.add(own / "saved" / "checkpoint-7")
    assert uploads.wait() is None
    fetched = download.fetch_checkpoint(f"{url}/auto", own)
    assert files_of(fetched) == files_of((output if is_shared else output / "node-0") / "saved" / "checkpoint-7")
    return calls.count("put_file"), calls.count("get")


@pytest.mark.parametrize(("is_shared", "expected"), [(True, [(3, 1), (1, 1)]), (False, [(4, 1), (0, 1)])])
def test_ranks_that_share_a_directory_divide_the_download(tmp_path, storage, is_shared, expected):
    url = f"s3://{BUCKET}/run"
    results = run_ranks(_exchange, 2, url, tmp_path, is_shared, environment=storage.environment)
    assert results == expected
