"""After kill -9 at any moment, a checkpoint is complete or absent, and no complete one is lost."""

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import pytest

from hf_fsdp_recipes.saving.directory import OutputDirectory, list_checkpoints
from hf_fsdp_recipes.saving.hashing import read_facts
from tests.ranks.harness import start_ranks
from tests.saving.runs import before_writing, steps_in, train

forking = multiprocessing.get_context("fork")
ROOT = Path(__file__).resolve().parents[2]
EVENTS = ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree")


def _save(run, step, published):
    written = run.begin(step)
    (written / "part").mkdir()
    (written / "part" / "data").write_bytes(os.urandom(10))
    (written / "trainer_state.json").write_text("{}")
    (run.path / written.name / "extra").write_text("of another callback")
    run.hide(written)
    files = {
        name: read_facts(written / name) for name in ("part/data", "extra", "trainer_state.json")
    }
    run.publish(written, {"step": step}, files)
    published[0] = step
    run.prune(1, step, None)


def _save_until_killed(output, event_of_kill, published):
    """Save steps 2, 2 again, and 4; keep one. Be killed before a file operation, counted from 1."""
    count = 0

    def see(event, arguments):
        nonlocal count
        if event in EVENTS:
            count += 1
            if count == event_of_kill:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)
    run = OutputDirectory(output)
    run.open("run", None, 0)
    for step in (2, 2, 4):
        _save(run, step, published)
    run.close()


def test_no_file_operation_of_a_save_is_a_wrong_moment_for_a_kill(tmp_path):
    for event_of_kill in range(1, 1000):
        output, published = tmp_path / str(event_of_kill), RawArray("i", 1)
        process = forking.Process(
            target=_save_until_killed, args=(output, event_of_kill, published)
        )
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        steps = steps_in(output)
        assert max(steps, default=0) >= published[0], f"lost after event {event_of_kill}"
        latest = next(iter(list_checkpoints(output)), None)
        resumed = latest and str(latest)
        OutputDirectory(output).open("run", resumed, max(steps, default=0))  # the next start
        assert steps_in(output) == steps
        assert len(list(output.glob("_saving/*"))) == 1  # the lock
        assert not any(path.is_symlink() for path in output.iterdir())
    assert event_of_kill > 60 and steps_in(output) == [4] and len(list(output.iterdir())) == 1


def _kill_while_writing_step_4(trainer):
    before_writing("checkpoint-4/optimizer", lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_run_killed_while_it_writes_resumes_exactly(fsdp, run, tmp_path):
    uninterrupted = run(tmp_path / "whole")[0]
    killed = functools.partial(train, tmp_path / "run", prepare=_kill_while_writing_step_4)
    processes, _ = start_ranks(killed, 2, environment=fsdp)
    for process in processes:
        process.join(60)
    assert -signal.SIGKILL in {process.exitcode for process in processes}
    assert steps_in(tmp_path / "run") == [2] and len(list((tmp_path / "run").glob("_saving"))) == 1
    resumed = run(tmp_path / "run")[0]
    assert resumed == uninterrupted | {"resumed": "checkpoint-2"}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
    ]


@pytest.mark.slow
def test_random_kills_and_mutations_never_change_a_result(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.soak",
        "--kills",
        "6",
        "--mutations",
        "6",
        "--disk",
        tmp_path / "soak",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "soak" / "soak.json").read_text())["violations"] == []
