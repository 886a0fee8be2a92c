"""Tells all ranks, once per step, whether any rank got a signal and whether a save has failed."""

import ctypes
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # prctl's number for this option, from linux/prctl.h


class StepFlags:
    """Exchanges two flags among the ranks: one for a signal, one for a failed save.

    All ranks learn of a flag in the same step. The exchange is one all-reduce of two integers in
    host memory. It starts before the optimizer step and runs during the step.

    Args:
        listen: whether to install handlers for STOP_SIGNALS, and to ask the kernel for SIGTERM if
            the launcher dies. This has an effect only in the main thread, because Python allows
            handlers only there.
    """

    def __init__(self, listen: bool) -> None:
        self._signal = 0
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._previous: dict[signal.Signals, Any] = {}
        if listen and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._record)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def _record(self, number: int, frame: object) -> None:
        self._signal = number

    def start(self, has_failed: bool) -> None:
        """Start an exchange, after the last one. Collective, in the main thread."""
        self.finish()
        self._flags = torch.tensor([self._signal, has_failed], dtype=torch.int32)
        if distributed.is_distributed():
            self._work = dist.all_reduce(
                self._flags,
                dist.ReduceOp.MAX,
                distributed.host_group(),
                async_op=True,
            )

    def finish(self) -> tuple[int, bool]:
        """Wait for the exchange that has been started, if any. Collective.

        Return the signal that any rank got, or 0, and whether any rank's save has failed.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        number, any_failed = self._flags.tolist()
        return number, bool(any_failed)

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
