"""After a power cut, what has its final name is whole, and nothing older is lost without it.

The power cut is emulated with the worst that a file system may do: a rename survives, but not what
was not flushed with fsync before, neither a file's content nor a directory's entries.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.saving.runs import contents_of, digests_in, names_in, steps_in

SLOW = pytest.mark.slow


def _state_of(status):
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _copy_flushed(source, target, flushed):
    """Copy what a power cut would leave of a file or directory."""
    is_flushed = _state_of(source.stat()) in flushed
    if not source.is_dir():
        target.write_bytes(source.read_bytes() if is_flushed else b"")
        return
    target.mkdir(parents=True)
    for child in source.iterdir() if is_flushed else []:
        _copy_flushed(child, target / child.name, flushed)


def _cut_power_at_each_final_name(trainer):
    """Copy what a power cut would leave after each final name, to `cuts/<number>/<name>`.

    Note each checkpoint that leaves the directory before all earlier renames in it were flushed.
    """
    output = Path(trainer.args.output_dir)
    log = output.with_name("flushed")
    flush = os.fsync

    def flush_and_note(descriptor):
        state = _state_of(os.fstat(descriptor))
        flush(descriptor)
        with log.open("a") as stream:
            stream.write(f"{state}\n")

    def see(event, arguments):
        if event != "os.rename":
            return
        source, target = map(Path, arguments[:2])
        flushed = set(log.read_text().splitlines())
        if source.parent == output != target.parent and _state_of(output.stat()) not in flushed:
            output.with_name("deleted-too-early").touch()
        if target.parent in (output, output.parent) and source.parent != output:
            number = len(names_in(output.with_name("cuts")))
            _copy_flushed(source, output.with_name("cuts") / str(number) / target.name, flushed)

    os.fsync = flush_and_note
    sys.addaudithook(see)


@pytest.mark.parametrize(
    "world", ["fsdp", pytest.param("ddp", marks=SLOW), pytest.param("one", marks=SLOW)]
)
def test_after_a_power_cut_each_checkpoint_and_export_is_whole(run, tmp_path, world):
    options = {"world": world, "save_total_limit": 1, "callback": {"export_dir": tmp_path / "end"}}
    whole = run(tmp_path / "run", prepare=_cut_power_at_each_final_name, **options)
    left = [names_in(cut) for cut in sorted((tmp_path / "cuts").iterdir())]
    assert left[:2] == [["checkpoint-2"], ["checkpoint-4"]] and left[-1] == ["end"]
    assert not (tmp_path / "deleted-too-early").exists()
    assert [steps_in(tmp_path / "cuts" / name) for name in "01"] == [[2], [4]]
    export = tmp_path / "cuts" / str(len(left) - 1) / "end"
    assert contents_of(export) == contents_of(tmp_path / "end")
    assert digests_in(export) == whole[0]["trained"]
    resumed = run(tmp_path / "cuts" / "0", world=world)
    assert resumed[0]["resumed"] == "checkpoint-2"
    assert resumed[0]["weights"] == whole[0]["weights"]
