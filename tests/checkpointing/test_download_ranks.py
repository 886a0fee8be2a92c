"""Nodes with local disks download only what their ranks read, and continue the run exactly."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_fsdp_recipes import export_checkpoint, latest_checkpoint
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.verification import check_named
from hf_fsdp_recipes.errors import CheckpointError, ExportError
from tests.checkpointing.object_storage import BUCKET
from tests.checkpointing.test_mirror_ranks import wait_for
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks, start_ranks
from tests.recipes.launching import run_recipe
from tests.recipes.test_sft import recipe

BLOCK_BYTES = 4096
URL = f"s3://{BUCKET}/run/auto"


def _train(arguments):
    """Run the recipe; checkpoints have checksums for small blocks."""
    from hf_fsdp_recipes.checkpointing import direct_io

    direct_io.BUFFER_BYTES = direct_io.CHECKSUM_BLOCK_BYTES = BLOCK_BYTES
    run_recipe(arguments)


def _train_on_nodes(arguments, output, ranks_per_node, slow):
    """Run the recipe on nodes with local disks; return names and sizes of the files and blocks that this rank downloads.

    `slow` is (rank, seconds): that rank's first download of a block takes this much longer.
    """
    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.checkpointing import direct_io, storage
    from hf_fsdp_recipes.errors import RecipeError

    direct_io.CHECKSUM_BLOCK_BYTES = BLOCK_BYTES
    storage.RETRY_SECONDS = (0.01,)
    rank = int(os.environ["RANK"])
    node = output / f"node-{rank // ranks_per_node}"
    distributed.node_id = lambda: node.name
    found, attempt = [], storage.Storage.attempt
    waits = [slow[1]] if slow and slow[0] == rank else []

    def record(self, method, *rest, **keywords):
        is_block = method == "cat_file" and "start" in keywords
        if is_block and waits:
            time.sleep(waits.pop())
        result = attempt(self, method, *rest, **keywords)
        if method == "get":
            found.extend(("/".join(Path(file).parts[-2:]), Path(file).stat().st_size) for file in rest[1])
        if is_block:
            found.append((f"{'/'.join(Path(rest[0]).parts[-2:])} {keywords['start']}", len(result)))
        return result

    storage.Storage.attempt = record
    node.mkdir(exist_ok=True)
    os.chdir(node)
    try:
        run_recipe([*arguments, "--output_dir", "run"])
    except SystemExit as error:
        if isinstance(error.__context__, RecipeError):
            (output / f"error-{rank}").write_text(f"{type(error.__context__).__name__}: {error.__context__}")
        raise
    return found


@pytest.fixture
def save(changed_model, text_file, tmp_path, storage):
    """Return a function that trains 6 steps, uploads the checkpoint of step 4, and returns a function that resumes it."""
    model = changed_model(hidden_size=128, intermediate_size=256)
    settings = {"model_name_or_path": model, "dataset_name": text_file, "report": False}

    def train(num_ranks, fsdp=FSDP2, parallel=None, **changes):
        config = recipe(tmp_path, **settings, **changes)
        environment = fsdp_environment(fsdp, parallel) | storage.environment
        command = ["--config", config, "--output_dir", tmp_path / "whole"]
        run_ranks(_train, num_ranks, command, environment=environment, timeout_seconds=200)
        checkpoint = tmp_path / "whole" / "checkpoint-4"
        for name in [*layout.files_in(checkpoint), layout.MANIFEST]:
            body = (checkpoint / name).read_bytes()
            storage.client.put_object(Bucket=BUCKET, Key=f"run/checkpoint-4/{name}", Body=body)
        command = ["--config", config, "--resume_from_checkpoint", URL, "--save_strategy", "no"]

        def resume(num_ranks, ranks_per_node, *more, slow=None, start=run_ranks, **keywords):
            arguments = [*command, *more], tmp_path, ranks_per_node, slow
            return start(_train_on_nodes, num_ranks, *arguments, environment=environment, **keywords)

        return resume

    return train


def num_bytes(found):
    return sum(count for _, count in found)


def whole_bytes(output):
    return sum(entry["bytes"] for entry in layout.read_manifest(output / "checkpoint-4")["files"].values())


def check_run(tmp_path, tolerance=0.0):
    """Check that the resumed run has the uninterrupted run's weights and has deleted everything it downloaded."""
    expected, resumed = (load_file(tmp_path / run / "export" / "model.safetensors") for run in ("whole", "node-0/run"))
    assert expected.keys() == resumed.keys()
    for name, values in expected.items():
        torch.testing.assert_close(resumed[name], values, rtol=tolerance, atol=tolerance)
    for node in tmp_path.glob("node-*"):
        assert not list(node.glob("run/*checkpoint-*"))


@pytest.mark.parametrize("fsdp", [FSDP2, pytest.param(FSDP1, marks=pytest.mark.slow)], ids=["fsdp2", "fsdp1"])
def test_node_downloads_what_its_rank_reads_and_continues_the_run_exactly(save, tmp_path, fsdp):
    found = save(2, fsdp)(2, 1, timeout_seconds=200)
    share = [num_bytes(of_rank) / whole_bytes(tmp_path / "whole") for of_rank in found]
    assert max(share) < 0.6, share
    for rank, of_rank in enumerate(found):
        of_model = {name.split()[0] for name, _ in of_rank if name.startswith("pytorch_model_fsdp_0/__")}
        assert of_model == {f"pytorch_model_fsdp_0/__{rank}_0.distcp"}
    check_run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now", "limit"), [(4, 2, 0.6), (2, 4, 0.6)])
def test_nodes_with_another_number_of_ranks_download_their_part(save, tmp_path, before, now, limit):
    more = ["--per_device_train_batch_size", str(8 // max(before, now))]
    found = save(before, per_device_train_batch_size=8 // before)(now, now // 2, *more, timeout_seconds=200)
    nodes = [found[: now // 2], found[now // 2 :]]
    share = [sum(map(num_bytes, node)) / whole_bytes(tmp_path / "whole") for node in nodes]
    assert max(share) < limit, share
    for node in nodes:  # the ranks of a node download different bytes
        names = [name for of_rank in node for name, _ in of_rank]
        assert len(names) == len(set(names))
    check_run(tmp_path, tolerance=1e-4)


@pytest.mark.slow
def test_replicas_read_chunks_from_the_files_of_all_ranks(save, tmp_path):
    save(4, parallel={"dp_replicate_size": 2, "dp_shard_size": 2})(4, 2, timeout_seconds=200)
    check_run(tmp_path)


@pytest.mark.slow
def test_adapters_continue_from_a_part_of_their_checkpoint(save, tmp_path):
    resume = save(2, use_peft=True, lora_target_modules="all-linear", lora_r=16)
    found = resume(2, 1, timeout_seconds=200)
    assert all(num_bytes(of_rank) < whole_bytes(tmp_path / "whole") for of_rank in found)
    # Again, from a mounted bucket. The first attempt's export belongs to the same run, so it may be replaced.
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "mount" / "checkpoint-4")
    again = resume(2, 1, "--resume_from_checkpoint", tmp_path / "mount" / "auto", timeout_seconds=200)
    assert [sorted(of_rank) for of_rank in again] == [sorted(of_rank) for of_rank in found]
    exports = [tmp_path / run / "export" / "adapter_model.safetensors" for run in ("whole", "node-0/run")]
    assert exports[0].read_bytes() == exports[1].read_bytes()


@pytest.mark.slow
def test_slow_download_on_one_node_outlasts_the_timeout_of_collectives(save, tmp_path):
    save(2)(2, 1, "--ddp_timeout", "5", slow=(1, 10.0), timeout_seconds=200)
    check_run(tmp_path)


def test_killed_or_failed_download_leaves_nothing_that_counts_and_the_next_one_works(save, tmp_path, storage):
    resume = save(2)
    processes, _results = resume(2, 1, slow=(1, 600.0), start=start_ranks)
    try:
        wait_for(lambda: list(tmp_path.glob("node-0/run/.checkpoint-4.download/*/*.distcp")))
    finally:
        for process in processes:
            process.kill()
            process.join()
    run = tmp_path / "node-0" / "run"
    part = run / ".checkpoint-4.download"
    assert (part / "trainer_state.json").is_file()
    assert layout.list_checkpoints(run) == [] and latest_checkpoint(run) is None
    with pytest.raises(CheckpointError, match="is not a complete checkpoint directory"):
        check_named(part)
    with pytest.raises(ExportError):
        export_checkpoint(part, tmp_path / "export")

    key = "run/checkpoint-4/optimizer_0/__1_0.distcp"
    body = storage.read(key)
    storage.client.put_object(Bucket=BUCKET, Key=key, Body=body[:-5000] + bytes(5000))
    errors = resume(2, 1, expect_failure=True, timeout_seconds=200)
    assert errors == [("SystemExit", "1")] * 2
    messages = [(tmp_path / f"error-{rank}").read_text() for rank in range(2)]
    assert (
        messages[0]
        == messages[1]
        == (
            f"CheckpointError: s3://{BUCKET}/run/checkpoint-4 cannot be resumed from: optimizer_0/__1_0.distcp is missing, or "
            f"its checksum differs from the manifest's. Start again, or use another checkpoint."
        )
    )
    assert latest_checkpoint(run) is None
    storage.client.put_object(Bucket=BUCKET, Key=key, Body=body)
    resume(2, 1, timeout_seconds=200)
    check_run(tmp_path)


@pytest.mark.slow
def test_full_disk_on_one_node_is_one_sentence_on_all(save, tmp_path, mount):
    resume = save(2)
    (tmp_path / "node-1").mkdir()
    mount(tmp_path / "node-1", 1_000_000)
    assert resume(2, 1, expect_failure=True, timeout_seconds=200) == [("SystemExit", "1")] * 2
    messages = {(tmp_path / f"error-{rank}").read_text() for rank in range(2)}
    assert messages == {
        "CheckpointError: run/.checkpoint-4.download cannot be written: No space left on device. Check permissions and free "
        "space."
    }


@pytest.mark.slow
def test_nodes_that_share_the_directory_divide_the_download_and_keep_the_checkpoint(save, tmp_path):
    found = save(2)(2, 2, timeout_seconds=200)
    assert sum(map(num_bytes, found)) == whole_bytes(tmp_path / "whole")
    assert min(map(num_bytes, found)) > 0.4 * whole_bytes(tmp_path / "whole")
    assert layout.validate(tmp_path / "node-0" / "run" / "checkpoint-4", verify=True) is None
