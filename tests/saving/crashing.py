"""Trains until the last rank crashes. test_crash_launch.py starts it with torchrun.

python -m torch.distributed.run --nproc_per_node=2 -m tests.saving.crashing OUTPUT HOW
"""

import os
import sys
from pathlib import Path

from tests.saving.runs import on, rank, train

CRASH_STEP = 5


def main(output, how):
    def crash(state, control):
        if state.global_step == CRASH_STEP and rank() == 1:
            Path(f"{output}-crashes").touch()
            if how == "exit":
                os._exit(1)
            raise ValueError("a bad row")

    train(output, prepare=lambda trainer: on(trainer, "on_step_begin", crash), max_steps=40)


if __name__ == "__main__":
    main(*sys.argv[1:])
