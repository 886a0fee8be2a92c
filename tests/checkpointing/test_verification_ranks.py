"""Ranks share the verification of a checkpoint and agree on its result."""

import pytest

from hf_fsdp_recipes.checkpointing import layout
from tests.ranks.harness import run_ranks


@pytest.fixture
def run(tmp_path):
    incomplete = layout.start(tmp_path, 10)
    files = [f"part-{number}.bin" for number in range(4)]
    for name in files:
        (incomplete / name).write_bytes(name.encode() * 100)
    entries = layout.manifest_entries(incomplete, files)
    layout.commit(incomplete, layout.directory_for(tmp_path, 10), entries, {"step": 10})
    return tmp_path


def _verify(run, is_blind):
    """Return the checkpoint that is found and the files that this rank reads; the files may be hidden from rank 1."""
    import torch.distributed as dist

    from hf_fsdp_recipes import latest_checkpoint

    dist.init_process_group("gloo")
    read, checksum, validate = [], layout.checksum, layout.validate
    layout.checksum = lambda file: read.append(file.name) or checksum(file)
    if is_blind and dist.get_rank() == 1:
        layout.validate = lambda directory, **rest: "part-0.bin is missing"
    found = latest_checkpoint(run)
    layout.validate = validate
    return found and found.name, sorted(read)


def test_each_rank_reads_its_part(run):
    results = run_ranks(_verify, 2, run, False)
    assert [name for name, _ in results] == ["checkpoint-10"] * 2
    assert [len(read) for _, read in results] == [2, 2]
    assert len({name for _, read in results for name in read}) == 4


def test_damage_that_one_rank_finds_is_known_to_all(run):
    (run / "checkpoint-10" / "part-3.bin").write_bytes(b"PART-3.bin" * 100)
    assert [name for name, _ in run_ranks(_verify, 2, run, False)] == [None] * 2


def test_rank_without_the_files_is_an_error_instead_of_a_new_start(run):
    errors = run_ranks(_verify, 2, run, True, expect_failure=True)
    assert {name for name, _ in errors} == {"CheckpointError"}
    assert all("not on rank 1: part-0.bin is missing. Mount the same output_dir" in text for _, text in errors)


def _fail_on_rank_1(run):
    import torch.distributed as dist

    from hf_fsdp_recipes import latest_checkpoint
    from hf_fsdp_recipes.errors import CheckpointError

    dist.init_process_group("gloo")
    find_size = layout.find_size

    def fail(file):
        raise CheckpointError(f"{file.name} cannot be read: Stale file handle")

    layout.find_size = fail if dist.get_rank() == 1 else find_size
    try:
        latest_checkpoint(run)
    finally:
        layout.find_size = find_size


def test_file_system_that_fails_on_one_rank_is_an_error_on_all(run):
    errors = run_ranks(_fail_on_rank_1, 2, run, expect_failure=True)
    assert {name for name, _ in errors} == {"CheckpointError"}
    assert all("part-0.bin cannot be read: Stale file handle" in text for _, text in errors)
