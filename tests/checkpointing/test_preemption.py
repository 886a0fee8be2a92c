"""Signals that stop a run, tested without ranks."""

import signal
import threading

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
