"""Signals that ask a run to end: noticed by one rank, agreed on by all, acted on at a step's end.

SIGTERM and SIGUSR1 set a flag. At the end of a step all ranks ask each other in one small collective; if any
was signalled, all write a checkpoint and leave with the same exit status. A second signal changes nothing.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed

EXIT_PREEMPTED = 85  # a checkpoint was written because of a signal; submit the same command again to go on
PR_SET_PDEATHSIG = 1  # linux/prctl.h
WATCHED = (signal.SIGTERM, signal.SIGUSR1)


class SignalWatch:
    """Watches for signals on this rank and agrees with the others. Every rank has one.

    Args:
        every_steps: how often the ranks ask each other; a signal waits for at most so many steps.
    """

    def __init__(self, every_steps: int = 1) -> None:
        self._every_steps = max(1, every_steps)
        self._received = 0
        self._is_agreed = False
        self._previous: dict[signal.Signals, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def start(self) -> None:
        """Install the handlers. Collective: every rank must call this, from its main thread."""
        if distributed.is_distributed() and self._group is None:
            self._group = dist.new_group(backend="gloo")
        for number in WATCHED:
            self._previous[number] = signal.signal(number, self._note)
        _follow_launcher()
        _ask_for_patience()

    def stop(self) -> None:
        """Put the handlers back that were there before."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    def is_agreed(self, step: int) -> bool:
        """Tell whether any rank was signalled. Collective: every rank must call this at the same steps."""
        if step % self._every_steps == 0 and not self._is_agreed:
            flag = torch.tensor([self._received], dtype=torch.int32)
            if self._group is not None:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
            if flag.item():
                self._is_agreed = True
                name = signal.Signals(int(flag.item())).name
                distributed.print_main(f"{name} received: writing a checkpoint at step {step}, then ending")
        return self._is_agreed

    def exit_if_signalled(self, completed: Path | None) -> None:
        """Leave with EXIT_PREEMPTED after an agreed stop.

        Raises:
            SystemExit: on every rank, if they agreed to stop.
        """
        if self._is_agreed:
            distributed.print_main(f"stopped by a signal; resume from {completed} with --resume_from_checkpoint auto")
            distributed.barrier()
            sys.exit(EXIT_PREEMPTED)

    def _note(self, number: int, frame: Any) -> None:
        self._received = number


def _follow_launcher() -> None:
    """Have the kernel send SIGTERM to this rank when its launcher dies.

    torchrun starts ranks in sessions of their own; if it is killed itself, they would train on unseen, beside the
    run that replaces them and into the same directory. Linux only; elsewhere nothing happens.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def _ask_for_patience() -> None:
    """Say so where torchrun would kill the ranks before a checkpoint can be written."""
    timeout = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if "TORCHELASTIC_RUN_ID" in os.environ and timeout is None:
        distributed.print_main(
            "note: torchrun kills its ranks 30 s after it is signalled itself. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 (and, "
            "to pass SIGUSR1 on, PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1) before launching, so that a "
            "preempted run can finish its checkpoint."
        )
