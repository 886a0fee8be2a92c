"""An export is complete or absent, and an error on one rank is one on all.

An existing directory is never touched.
"""

import functools
import os
import time

import pytest

from hf_fsdp_recipes.export.files import FileWriter
from tests.export.cases import assert_same_tensors, load, shard
from tests.ranks.harness import run_ranks, start_ranks

EXPORT = {"max_shard_size": "40KB"}


def _export(directory, target, prepare=lambda model: None):
    from hf_fsdp_recipes import export_model

    model = shard(load(directory))
    prepare(model)
    return export_model(model, target, **EXPORT).name


def test_existing_directories_files_and_links_are_never_touched(tiny_model, tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "notes.txt").write_text("mine")
    (tmp_path / "export-1").symlink_to(tmp_path / "nowhere")
    (tmp_path / "export-2").write_text("mine")
    assert run_ranks(_export, 2, tiny_model(), tmp_path / "export") == ["export-3"] * 2
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["notes.txt"]
    assert (tmp_path / "export-2").read_text() == "mine"
    assert_same_tensors(tiny_model(), tmp_path / "export-3")


def test_only_ranks_of_rank_0s_node_write(tiny_model, tmp_path):
    run_ranks(_export_to_own_disk, 3, tiny_model(), tmp_path)
    assert_same_tensors(tiny_model(), tmp_path / "0" / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def _export_to_own_disk(directory, folder):
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # each rank on a node of its own
    return _export(directory, folder / os.environ["RANK"] / "export")


# Errors.


def _put_nan(model, value=float("nan")):
    parameter = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    if os.environ["RANK"] == "1":
        parameter.to_local().data[0, 0] = value


def _fail_to_write(model, number="1"):
    write, calls = FileWriter._write, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        write(*arguments)

    if os.environ["RANK"] == number:
        FileWriter._write = fail


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (_put_nan, "model.layers.1.mlp.up_proj.weight contains NaN"),
        pytest.param(
            functools.partial(_put_nan, value=float("inf")),
            "contains NaN or inf",
            marks=pytest.mark.slow,
        ),
        (_fail_to_write, "cannot be written: OSError: .* No space left"),
        pytest.param(
            functools.partial(_fail_to_write, number="0"), "No space left", marks=pytest.mark.slow
        ),
    ],
)
def test_an_error_on_one_rank_is_one_error_on_all_and_leaves_nothing(
    prepare, error, tiny_model, tmp_path
):
    import re

    errors = run_ranks(_export, 2, tiny_model(), tmp_path / "export", prepare, expect_failure=True)
    assert errors[0] == errors[1]
    assert re.search(error, errors[0][1]), errors[0]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tiny_model, mount, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(disk, 64 * 1024)
    errors = run_ranks(_export, 2, tiny_model(), disk / "export", expect_failure=True)
    assert errors[0] == errors[1]
    assert "No space left" in errors[0][1]
    assert list(disk.iterdir()) == []


def _stall(model):
    """Let the second file wait forever."""
    write, files = FileWriter._write, set()

    def stall(writer, file, *arguments):
        files.add(file)
        if len(files) > 1:
            time.sleep(60)
        write(writer, file, *arguments)

    FileWriter._write = stall


def test_a_killed_export_never_gets_the_name_and_the_next_one_removes_it(tiny_model, tmp_path):
    processes, _ = start_ranks(_export, 2, tiny_model(), tmp_path / "export", _stall)
    started = time.monotonic()
    while not any(file.stat().st_size for file in tmp_path.glob(".export-tmp-*/*.safetensors")):
        assert time.monotonic() - started < 60
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.join()
    assert [path.name[:12] for path in tmp_path.iterdir()] == [".export-tmp-"]
    assert run_ranks(_export, 2, tiny_model(), tmp_path / "export") == ["export"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert_same_tensors(tiny_model(), tmp_path / "export")
