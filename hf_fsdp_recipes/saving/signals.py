"""Tells all ranks, once per step, whether any rank got a signal and whether a save has failed."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LAST_WORDS_SECONDS = 5.0  # how long a rank may take to fail by itself after another one has ended


class StepFlags:
    """Exchanges two flags among the ranks: one for a signal, one for a failed save.

    All ranks learn of a flag in the same step. The exchange is one all-reduce of two integers in
    host memory. It starts before the optimizer step and runs during the step.

    After a rank has crashed, the launcher sends SIGTERM to the others. They cannot save, because
    they may wait forever for the crashed rank, so a thread ends them. Collective to create.

    Args:
        listen: whether to install handlers for STOP_SIGNALS, and to get SIGTERM if the launcher
            dies. This has an effect only in the main thread, because Python allows
            handlers only there.

    Attributes:
        told: the signal that all ranks know of, or 0.
    """

    def __init__(self, listen: bool) -> None:
        self._process = os.getpid()
        self.told = 0
        self._signal = 0
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._is_closed = threading.Event()
        ranks = distributed.gather(self._process)
        self._watcher = ThreadPoolExecutor(1)
        if listen and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not None:  # else Python could not restore it
                    self._previous[number] = signal.signal(number, self._record)
            if "TORCHELASTIC_RUN_ID" in os.environ:  # other parents may end, such as a shell
                self._watcher.submit(self._watch, ranks)

    def _record(self, number: int, frame: object) -> None:
        if os.getpid() == self._process:
            self._signal = number
        elif number == signal.SIGTERM:  # a fork has the handler, too; it ignores SIGUSR1
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _watch(self, ranks: list[int]) -> None:
        """If the launcher ends, get SIGTERM. Soon after another of its ranks has ended, end."""
        launcher = psutil.Process(os.getppid())
        others = [child for child in launcher.children() if child.pid in ranks]
        while all(rank.is_running() for rank in others):
            if self._is_closed.wait(1.0):
                return
            if os.getppid() != launcher.pid:
                os.kill(self._process, signal.SIGTERM)
        if not self._is_closed.wait(LAST_WORDS_SECONDS):
            os.write(2, b"another rank of this node has ended, so this one ends too\n")
            os.kill(self._process, signal.SIGKILL)

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

    def finish(self) -> bool:
        """Wait for the exchange that has been started, if any. Collective.

        Return whether any rank's save has failed.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        number, any_failed = self._flags.tolist()
        self._flags.zero_()
        if number:
            self.told = number
        return any_failed

    def close(self, kind: object, *_: object) -> None:
        """Restore the previous signal handlers.

        They get a signal that came too late to be told, unless an error of this `kind` is raised.
        """
        self._is_closed.set()
        self._watcher.shutdown()
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._record:  # no other code has replaced it
                signal.signal(number, handler)
        if self._signal and not self.told and kind is None:
            signal.raise_signal(self._signal)
