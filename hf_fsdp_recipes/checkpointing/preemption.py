"""Stops a run on SIGTERM or SIGUSR1: all ranks write a checkpoint and stop at the same step.

A signal sets a flag, which the ranks all-reduce while the optimizer steps. If any rank was signaled, all ranks write a
checkpoint at the end of the step and exit with the same status. Further signals are ignored.
"""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed

EXIT_PREEMPTED = 85  # exit status of a run that a signal stopped after a checkpoint; the same command continues it
PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_AT_IMPORT = os.getpid(), os.getppid()  # this process and the launcher that started it


class SignalWatch:
    """Watches for signals on this rank and shares them with the other ranks. Create one on every rank."""

    def __init__(self) -> None:
        self._received = 0
        # Result of the last all-reduce: a signal's number (0: no signal), and whether a rank has failed.
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._is_agreed = False
        self._previous: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        """Install the signal handlers. Call it on every rank.

        Python allows handlers only in the main thread. In another thread, as in Ray Train, this prints a note instead.
        """
        if threading.current_thread() is not threading.main_thread():
            distributed.print_main(
                "note: Python allows signal handlers only in the main thread, and training runs in another one, so SIGTERM and "
                "SIGUSR1 end the run without a last checkpoint"
            )
            return
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._record)
        _end_with_launcher()
        _warn_of_short_shutdown()

    def stop(self) -> None:
        """Restore the handlers that were installed before `start`."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    @property
    def is_stopping(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._is_agreed

    def start_exchange(self, has_failed: bool) -> None:
        """Start an all-reduce of whether any rank was signaled or has failed. It runs while the optimizer steps.

        Collective: every rank must call this before the optimizer's step.
        """
        if self._is_agreed:
            return
        self._flags = torch.tensor([self._received, has_failed], dtype=torch.int32)
        if distributed.is_distributed():
            group = distributed.host_group()
            self._pending = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def finish_exchange(self, step: int) -> tuple[bool, bool]:
        """Wait for the all-reduce; return whether any rank was signaled, and whether any had failed when it started.

        Call it on every rank after the optimizer's step.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        number, any_failed = self._flags.tolist()
        self._flags.zero_()
        if number:
            self._is_agreed = True
            name = signal.Signals(number).name
            distributed.print_main(f"{name} received: writing a checkpoint at step {step}, then stopping")
        return self._is_agreed, bool(any_failed)

    def exit_if_signaled(self, completed: Path | None) -> None:
        """Exit with status EXIT_PREEMPTED if the ranks have agreed to stop. Collective."""
        if self._is_agreed:
            distributed.print_main(f"stopped by a signal; resume from {completed} with --resume_from_checkpoint auto")
            distributed.barrier()
            sys.exit(EXIT_PREEMPTED)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = number


def _end_with_launcher() -> None:
    """Have the kernel send SIGTERM to this rank if torchrun dies.

    Otherwise the rank would keep running, because torchrun starts each rank in a separate session.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    process, parent = _AT_IMPORT
    if process != os.getpid():  # forked since
        parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call; a launcher in a container may itself be process 1
        os.kill(os.getpid(), signal.SIGTERM)


def _warn_of_short_shutdown() -> None:
    """Print a note if torchrun may kill the ranks before they have written a checkpoint after a signal."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") is None:
        distributed.print_main(
            "note: torchrun kills its ranks 30 s after it is signaled. Before launching, set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 "
            "to give a preempted run time for its checkpoint, and "
            "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 to pass SIGUSR1 on."
        )
