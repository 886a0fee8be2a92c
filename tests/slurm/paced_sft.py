"""recipes/sft.py, each step of a job's first run as slow as PACE_SECONDS says, so that something can happen to it."""

import os
import runpy
import time
from pathlib import Path

from transformers import Trainer

PACE_SECONDS = float(os.environ.get("PACE_SECONDS", "0"))
training_step = Trainer.training_step


def slow_training_step(self, *arguments, **named):
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        time.sleep(PACE_SECONDS)
    return training_step(self, *arguments, **named)


Trainer.training_step = slow_training_step
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "sft.py"), run_name="__main__")
