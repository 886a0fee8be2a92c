"""Runs recipes/sft.py with PACE_SECONDS more for each step of the job's first run.

Alternatively, a FAILING_RANK raises an error, or a KILLED_RANK dies as when memory has run out.
"""

import os
import runpy
import signal
import time
from pathlib import Path

from transformers import Trainer

PACE_SECONDS = 0.0
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    PACE_SECONDS = float(os.environ.get("PACE_SECONDS", "0"))
training_step = Trainer.training_step


def slow_training_step(self, *arguments, **named):
    time.sleep(PACE_SECONDS)
    if os.environ.get("FAILING_RANK") == os.environ["RANK"] and self.state.global_step == 2:
        raise ArithmeticError("failing rank")
    if os.environ.get("KILLED_RANK") == os.environ["RANK"] and self.state.global_step == 2:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
    return training_step(self, *arguments, **named)


Trainer.training_step = slow_training_step
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "sft.py"), run_name="__main__")
