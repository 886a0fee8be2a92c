"""Trains until the last rank crashes. test_crash_launch.py starts it with torchrun.

python -m torch.distributed.run --nproc_per_node=2 -m tests.saving.crashing OUTPUT HOW WHERE
"""

import ctypes
import os
import sys
import time
from pathlib import Path

from hf_fsdp_recipes.saving import signals
from tests.saving.runs import on, rank, train

CRASH_STEP = 5


def crash(how, output):
    Path(f"{output}-crashes").touch()
    if how == "exit":
        os._exit(1)
    raise ValueError("a bad row")


def wait(where):
    """Wait for data, or outside of Python, as for a collective of an accelerator."""
    if where == "in Python":
        for _ in range(6000):
            time.sleep(0.01)
    if where == "in C":
        library = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)


def main(output, how, where):
    signals.LAST_WORDS_SECONDS = 1.0

    def crash_or_wait(state, control):
        if state.global_step == CRASH_STEP:
            if rank() == 0:
                wait(where)
            else:
                crash(how, output)

    train(output, prepare=lambda trainer: on(trainer, "on_step_begin", crash_or_wait), max_steps=40)


if __name__ == "__main__":
    main(*sys.argv[1:])
