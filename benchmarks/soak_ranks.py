"""The launcher and ranks of benchmarks/soak.py.

They are forked processes that train a tiny model and can wait at a file operation.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

MAX_RANKS = 4
NOTE = "note.txt"  # a callback adds it to each checkpoint
EVENTS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.symlink",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
)
PR_SET_CHILD_SUBREAPER = 36  # prctl's number, from linux/prctl.h
MODULES = (
    "tests.conftest",
    "tests.ranks.harness",
    "tests.saving.damage",
    "tests.saving.runs",
    "accelerate",
    "peft",
    "datasets",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "hf_fsdp_recipes.saving.callback",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",
)


class Board:
    """Shared memory.

    `trap` is a rank and the number of its file operation (from 1) at which it waits to be killed.
    """

    def __init__(self, trap: tuple[int, int] = (-1, -1)) -> None:
        self.pids: Any = RawArray("i", MAX_RANKS)
        # The file operations that each rank has reached.
        self.num_events: Any = RawArray("i", MAX_RANKS)
        self.trap = trap
        # Whether a rank waits at the trap; whether it may go on.
        self.state = RawArray("i", 2)
        # The step of the latest checkpoint that a rank has given its name.
        self.published: Any = RawArray("i", 1)

    def wait_for_pids(self, num_ranks: int) -> set[int]:
        """Return the process ids of the ranks when all are forked."""
        while not all(self.pids[:num_ranks]):
            time.sleep(0.001)
        return set(self.pids[:num_ranks])


def prepare() -> None:
    """Import once what the ranks need.

    Let this process wait for its grandchildren when their parent dies.
    """
    for name in MODULES:
        importlib.import_module(name)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def start_launcher(
    board: Board,
    num_ranks: int,
    variables: Mapping[str, str | None],
    output: Path,
    options: dict[str, Any],
) -> int:
    """Fork a process that forks the ranks and waits for them; return its process id.

    Like torchrun, it gives every rank its own session, and sends SIGTERM to the others when one
    fails. It exits with 0, or with the status of the first rank that failed. A variable that is
    None is not set on the ranks.
    """
    from tests.ranks.harness import free_port

    sys.stdout.flush()
    launcher = os.fork()
    if launcher:
        return launcher
    status = 1
    try:
        descriptor = os.open(output.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        launched = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                of_rank = launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(variables)
                os.environ |= {key: value for key, value in of_rank.items() if value is not None}
                os._exit(_run_rank(board, rank, output, options))
            board.pids[rank] = pid
        status = _wait_for_ranks(set(board.pids[:num_ranks]))
    finally:
        os._exit(status)


def _wait_for_ranks(alive: set[int]) -> int:
    status = 0
    while alive:
        pid, raw = os.wait()
        alive.discard(pid)
        if raw and not status:
            status = abs(os.waitstatus_to_exitcode(raw))
            for other in alive:
                os.kill(other, signal.SIGTERM)
    return status


def _run_rank(board: Board, rank: int, output: Path, options: dict[str, Any]) -> int:
    from tests.saving.runs import train

    os.setsid()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    _watch_files(board, rank, os.fspath(output))
    try:
        result = train(output, **options)
        (output.parent / f"result-{rank}.json").write_text(json.dumps(result))
        return 0
    except BaseException as error:
        traceback.print_exc()
        return int(getattr(error, "code", 1))


def extend_saves(trainer: Any) -> None:
    """Let a callback add a file to each checkpoint, and save the last step of an epoch again."""
    from tests.saving.runs import on

    def write_note(state: Any, control: Any) -> None:
        if state.is_world_process_zero:
            directory = Path(trainer.args.output_dir, f"checkpoint-{state.global_step}")
            (directory / NOTE).write_text(str(state.global_step))

    def save_again(state: Any, control: Any) -> None:
        control.should_save = True

    on(trainer, "on_save", write_note)
    on(trainer, "on_epoch_end", save_again)


def _watch_files(board: Board, rank: int, output: str) -> None:
    """Count this process's file operations in the output directory, and wait at the trap.

    Each is counted before it happens.
    """
    renames: dict[int, int] = {}  # the step of the checkpoint that a thread renames

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS:
            return
        paths = [os.fspath(item) for item in arguments if isinstance(item, str | os.PathLike)]
        is_in_output = any(path.startswith(output) for path in paths)
        # Deletions name their files relative to a directory's descriptor.
        if not is_in_output and event not in ("os.remove", "os.rmdir"):
            return
        thread = threading.get_ident()
        done = renames.pop(thread, 0)
        board.published[0] = max(board.published[0], done)
        published = re.fullmatch(rf"{re.escape(output)}/checkpoint-([1-9]\d*)", paths[-1])
        if event == "os.rename" and published:
            renames[thread] = int(published[1])
        board.num_events[rank] += 1
        if board.trap == (rank, board.num_events[rank]):
            board.state[0] = 1
            while not board.state[1]:
                time.sleep(0.0005)

    sys.addaudithook(see)
