"""Signals that stop a run, tested without ranks."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from hf_fsdp_recipes.checkpointing import preemption
from hf_fsdp_recipes.checkpointing.preemption import SIGNALS, SignalWatch


def test_run_in_a_thread_keeps_the_signal_handlers_and_says_so(capsys):
    before = [signal.getsignal(number) for number in SIGNALS]
    failures = []

    def watch():
        try:
            watch = SignalWatch()
            watch.start()
            watch.stop()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert not failures and [signal.getsignal(number) for number in SIGNALS] == before
    assert "SIGTERM and SIGUSR1 end the run without a last checkpoint" in capsys.readouterr().out


def test_handlers_of_the_main_thread_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    watch = SignalWatch()
    watch.start()
    assert all(signal.getsignal(number) == watch._record for number in SIGNALS)
    watch.stop()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize(("at_import", "now", "is_ended"), [(1, 1, False), (7, 7, False), (7, 1, True), (7, 8, True)])
def test_rank_ends_only_if_its_launcher_has_died_even_if_the_launcher_is_process_1(
    monkeypatch, at_import, now, is_ended
):
    sent = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setattr(preemption, "_AT_IMPORT", (os.getpid(), at_import))
    monkeypatch.setattr(preemption.ctypes, "CDLL", lambda *a, **k: SimpleNamespace(prctl=lambda *numbers: 0))
    monkeypatch.setattr(preemption.os, "getppid", lambda: now)
    monkeypatch.setattr(preemption.os, "kill", lambda *arguments: sent.append(arguments))
    preemption._end_with_launcher()
    assert sent == ([(os.getpid(), signal.SIGTERM)] if is_ended else [])
