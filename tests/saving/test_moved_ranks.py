"""A run's directory may be moved or copied. One that cannot be written is an error at the start."""

import shutil
import subprocess

import pytest

from tests.saving.runs import BEST, contents_of, steps_in

SLOW = pytest.mark.slow


def _rsync(source, target):
    if shutil.which("rsync") is None:
        pytest.skip("needs rsync")
    subprocess.run(["rsync", "-a", f"{source}/", target], check=True)


def _link(source, target):
    shutil.move(source, target.with_name("moved"))
    target.symlink_to("moved")


def _be_best_at_step_2(trainer):
    trainer.compute_metrics = lambda _: {"score": {2: 1, 4: 3, 6: 2}[trainer.state.global_step]}


@pytest.mark.parametrize(
    ("world", "move"),
    [
        pytest.param("fsdp", shutil.move, marks=SLOW),
        ("fsdp", _rsync),
        pytest.param("ddp", shutil.copytree, marks=SLOW),
        pytest.param("one", _link, marks=SLOW),
    ],
)
def test_a_run_continues_where_its_directory_was_moved(run, tmp_path, world, move):
    options = {"world": world, "max_steps": 6, "prepare": _be_best_at_step_2, **BEST}
    whole = run(tmp_path / "before", **options)
    shutil.rmtree(tmp_path / "before" / "checkpoint-6")
    move(tmp_path / "before", tmp_path / "after")
    if move in (_rsync, shutil.copytree):
        shutil.rmtree(tmp_path / "before")
    resumed = run(tmp_path / "after", **options)
    assert resumed[0]["resumed"] == "checkpoint-4"
    for result, expected in zip(resumed, whole, strict=True):
        assert result["best"] == (1, 2, str(tmp_path / "after" / "checkpoint-2"))
        assert result | {"resumed": None, "best": expected["best"]} == expected
    assert steps_in(tmp_path / "after")[-1] == 6


@pytest.mark.parametrize("world", ["fsdp", "one"])
def test_a_directory_that_is_read_only_is_an_error_before_training(run, mount, tmp_path, world):
    mount(tmp_path, 8 << 20)
    run(tmp_path / "run", world=world)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    before = contents_of(tmp_path)
    subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
    for result in run(tmp_path / "run", world=world):
        assert f"{tmp_path / 'run'} cannot be written" in result["error"]
        assert "Read-only file system" in result["error"] and result["optimizer"] == []
    assert contents_of(tmp_path) == before
