"""The launcher and ranks of benchmarks/soak.py: forked processes that run recipes/sft.py and report where they are.

A rank reports through shared memory. Python's audit events show which file a rank is about to touch, and so whether it is
loading, staging, writing or renaming. A kill can hit one chosen file operation, because the rank waits there to be killed.
"""

import ctypes
import faulthandler
import importlib
import json
import mmap
import os
import runpy
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "recipes" / "sft.py"
PHASES = ("load", "step", "staging", "writing", "commit", "deleting", "export", "export rename", "after export")
LOAD, STEP, STAGING, WRITING, COMMIT, DELETING, EXPORT, EXPORT_RENAME, AFTER_EXPORT = range(len(PHASES))
MAX_RANKS = 4
NOT_TRAINING = -1
COLLECTIVE_TIMEOUT_SECONDS = 30
TORCHRUN_POLL_SECONDS = 0.1  # how often torchrun looks at its ranks
DELETIONS = ("os.remove", "os.rmdir", "shutil.rmtree")
EVENTS = ("open", "os.mkdir", "os.rename", "os.truncate", *DELETIONS)


class RankBoard(ctypes.Structure):
    """The phase of one rank. `save_phase` is 0 when no save is in flight."""

    _fields_ = (
        ("pid", ctypes.c_int),
        ("phase", ctypes.c_int),
        ("save_phase", ctypes.c_int),
        ("trapped_in", ctypes.c_int),  # the phase in which this rank waits to be killed
        ("resumed_from", ctypes.c_int),
        ("seconds_loading", ctypes.c_double),
        ("seconds_training", ctypes.c_double),
        ("num_events", ctypes.c_int * len(PHASES)),
    )


class Board(ctypes.Structure):
    """Shared memory of one attempt."""

    _fields_ = (("is_released", ctypes.c_int), ("ranks", RankBoard * MAX_RANKS))

    def moment(self) -> str:
        """Return the phase of the trapped rank, or else of rank 0; a save in flight takes precedence over the step."""
        trapped = [rank.trapped_in for rank in self.ranks if rank.trapped_in != NOT_TRAINING]
        return PHASES[trapped[0] if trapped else self.ranks[0].save_phase or self.ranks[0].phase]

    def wait_for_pids(self, num_ranks: int) -> list[int]:
        """Return the process ids of the ranks when all are forked."""
        deadline = time.monotonic() + 60
        while not all(rank.pid for rank in self.ranks[:num_ranks]):
            if time.monotonic() > deadline:
                raise TimeoutError("the launcher has not started its ranks in 60 s")
            time.sleep(0.001)
        return [rank.pid for rank in self.ranks[:num_ranks]]


@dataclass(frozen=True)
class Trap:
    """The file operation at which a rank waits to be killed: number `event` (from 1) of a phase."""

    rank: int
    phase: int
    event: int


def new_board() -> Board:
    """Return a board that forked processes share."""
    board = Board.from_buffer(mmap.mmap(-1, ctypes.sizeof(Board)))
    for rank in board.ranks:
        rank.resumed_from = rank.trapped_in = NOT_TRAINING
    return board


def start_launcher(
    board: Board,
    world_size: int,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    log: Path,
    *,
    stops_others: bool = False,
    trap: Trap | None = None,
) -> int:
    """Fork a process that forks the ranks and waits for them, and return its process id.

    That process exits with 0, or with the first failed rank's status. Like torchrun, it gives every rank its own session.
    With `stops_others` it sends SIGTERM to the other ranks when one fails.
    """
    from tests.ranks.harness import free_port

    sys.stdout.flush()
    launcher = os.fork()
    if launcher:
        return launcher
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= {**environment, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        pids = [_fork_rank(board, rank, arguments, trap) for rank in range(world_size)]
        status = _wait_for_ranks(pids, stops_others)
    finally:
        os._exit(status)


def _fork_rank(board: Board, rank: int, arguments: Sequence[str], trap: Trap | None) -> int:
    pid = os.fork()
    if pid == 0:
        board.ranks[rank].pid = os.getpid()
        os._exit(_run_rank(board, rank, arguments, trap))
    board.ranks[rank].pid = pid
    return pid


def _wait_for_ranks(pids: Sequence[int], stops_others: bool) -> int:
    alive, status = set(pids), 0
    while alive:
        pid, raw = os.wait()
        alive.discard(pid)
        code = os.waitstatus_to_exitcode(raw)
        if code and stops_others and not status:
            time.sleep(TORCHRUN_POLL_SECONDS)
            for other in alive:
                os.kill(other, signal.SIGTERM)
        status = status or abs(code)
    return status


def _run_rank(board: Board, rank: int, arguments: Sequence[str], trap: Trap | None) -> int:
    from torch.distributed import distributed_c10d

    os.setsid()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # shows in the log where a rank hangs
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [str(SCRIPT), *arguments]
    output_dir = Path(arguments[arguments.index("--output_dir") + 1])
    watch = FileWatch(board, rank, output_dir, trap if trap is not None and trap.rank == rank else None)
    sys.addaudithook(watch.see)
    # On accelerators, ddp_timeout sets the timeout; on CPU ranks TrainingArguments does not pass it on.
    distributed_c10d.default_pg_timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    try:
        _report_steps(board.ranks[rank])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _report_steps(board: RankBoard) -> None:
    """Have every Trainer of this process report its steps."""
    from transformers import TrainerCallback, trainer

    started = time.perf_counter()

    class Reporter(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            board.resumed_from = state.global_step
            board.phase = STEP
            board.seconds_loading = time.perf_counter() - started

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            board.seconds_training = time.perf_counter() - started - board.seconds_loading

    trainer.DEFAULT_CALLBACKS.append(Reporter)


class FileWatch:
    """Follows a rank's file operations in its output directory through an audit hook. Each event precedes its operation."""

    def __init__(self, board: Board, rank: int, output_dir: Path, trap: Trap | None) -> None:
        self._board, self._own = board, board.ranks[rank]
        self._root = os.fspath(output_dir)
        self._trap = trap
        self._guard = threading.local()
        self._saving = ""  # the directory of the save in flight

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS or getattr(self._guard, "is_inside", False):
            return
        self._guard.is_inside = True
        try:
            path = _path_of(event, arguments)
            if path is not None and (path == self._root or path.startswith(self._root + "/")):
                self._record(event, path[len(self._root) + 1 :])
        finally:
            self._guard.is_inside = False

    def _record(self, event: str, path: str) -> None:
        phase = self._find_phase(event, path)
        self._own.num_events[phase] += 1
        if self._trap is not None and (phase, self._own.num_events[phase]) == (self._trap.phase, self._trap.event):
            self._own.trapped_in = phase
            while not self._board.is_released:
                time.sleep(0.001)
            self._own.trapped_in = NOT_TRAINING

    def _find_phase(self, event: str, path: str) -> int:
        """Return the phase that an operation belongs to, and move this rank to it. `path` is relative to the run."""
        own = self._own
        top, _, below = path.partition("/")
        if top.startswith(".export") or (top.startswith("export") and own.phase != LOAD):
            is_rename = event == "os.rename" and own.phase != AFTER_EXPORT
            own.phase = EXPORT_RENAME if is_rename else max(own.phase, EXPORT)
            return own.phase
        if own.phase == EXPORT_RENAME and not path:  # the directory is flushed after the rename
            own.phase = AFTER_EXPORT
            return EXPORT_RENAME
        if event in DELETIONS and "checkpoint-" in top:
            return DELETING
        if top.startswith(".checkpoint-"):
            own.save_phase = self._find_save_phase(event, top, below)
        elif own.save_phase == COMMIT and not path:  # likewise flushed after the rename of a checkpoint
            own.save_phase = 0
            return COMMIT
        return own.save_phase or own.phase

    def _find_save_phase(self, event: str, top: str, below: str) -> int:
        before = self._own.save_phase if top == self._saving else STAGING
        self._saving = top
        if event == "os.rename" or below == "manifest.json":
            return COMMIT
        return max(before, WRITING if "/" in below else STAGING)


def _path_of(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the absolute path that an audit event is about, or None. A run's output directory is an absolute path."""
    if not isinstance(arguments[0], str | bytes | os.PathLike):
        return None
    path = os.fsdecode(arguments[0])
    directory = arguments[1] if event in DELETIONS and len(arguments) > 1 else None
    if isinstance(directory, int) and directory >= 0:
        try:
            return os.fspath(Path(f"/proc/self/fd/{directory}").readlink() / path)
        except OSError:
            return None
    return path


class Processes:
    """Processes, tracked by file descriptor because not all of them are children of this process."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors: dict[int, int] = {}
        for pid in pids:
            try:
                self._descriptors[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue

    def wait(self, seconds: float) -> bool:
        """Wait for up to `seconds`, and return whether all have ended."""
        deadline = time.monotonic() + seconds
        for pid, descriptor in list(self._descriptors.items()):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
            os.close(self._descriptors.pop(pid))
        return True

    def send(self, number: signal.Signals) -> None:
        for descriptor in self._descriptors.values():
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                continue

    def end(self) -> None:
        """Kill the processes that are left, and show in the log where they were."""
        self.send(signal.SIGUSR2)
        time.sleep(0.5)
        self.send(signal.SIGKILL)
        self.wait(30)


def prepare(directory: Path) -> dict[str, dict[str, str]]:
    """Import what the ranks need, write model and rows, and return the environment of each FSDP version."""
    from tests.conftest import SENTENCES, make_tokenizer, tiny_config  # sets variables that the imports below read
    from tests.ranks.harness import FSDP1, FSDP2, PRELOAD, fsdp_environment

    for name in (
        *PRELOAD,
        "trl.scripts",
        "hf_fsdp_recipes.training.build",
        "hf_fsdp_recipes.training.data.preparation",
    ):
        importlib.import_module(name)
    import datasets.config
    import torch
    from transformers import AutoModelForCausalLM

    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    directory.mkdir(parents=True)
    rows = [json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES]
    (directory / "rows.jsonl").write_text("".join(rows))
    pid = os.fork()  # this process will fork ranks, so it must not have torch's threads
    if pid == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(directory / "model")
        make_tokenizer(directory / "model")
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit("the model could not be written")
    return {"fsdp1": fsdp_environment(FSDP1), "fsdp2": fsdp_environment(FSDP2)}
