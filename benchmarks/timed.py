"""Runs an unchanged training script and measures its steps from outside, with the same stopwatch for every script.

    accelerate launch --config_file TEMPLATE benchmarks/timed.py RESULT_DIRECTORY recipes/sft.py --config X.yaml
    accelerate launch --config_file TEMPLATE benchmarks/timed.py RESULT_DIRECTORY trl.scripts.sft --config X.yaml

The second command starts what `trl sft` starts. Both get FSDP on CPU ranks, which Accelerate lacks. Each rank writes
`rank-<n>.json`. The stopwatch is a callback that every Trainer gets.
"""

import itertools
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

WARMUP_STEPS = 4


def main() -> None:
    from transformers import trainer

    from hf_fsdp_recipes.patches import cpu_ranks

    directory, script, *arguments = sys.argv[1:]
    cpu_ranks.enable()
    trainer.DEFAULT_CALLBACKS.append(stopwatch_class(Path(directory)))
    sys.argv = [script, *arguments]
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def stopwatch_class(directory: Path) -> type:
    """Return a TrainerCallback that records the time of each step and the peak memory after the warm-up."""
    from transformers import TrainerCallback

    from hf_fsdp_recipes.metrics.memory import HostPeak, device_bytes

    class Stopwatch(TrainerCallback):
        def __init__(self) -> None:
            self.wall: list[float] = []
            self.cpu: list[float] = []
            self.memory = HostPeak()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARMUP_STEPS:
                self.memory.__enter__()
            if state.global_step >= WARMUP_STEPS and not self.wall:
                self.mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.wall:
                self.mark()

        def mark(self) -> None:
            # From the end of one step to the end of the next, including data, logging and callbacks.
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.memory.__exit__()
            spans = {"wall": self.wall, "cpu": self.cpu}
            found = {
                name: [after - before for before, after in itertools.pairwise(marks)] for name, marks in spans.items()
            }
            losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
            result = {
                **found,
                "losses": losses,
                "peak_bytes": self.memory.peak_bytes,
                "device_bytes": device_bytes()[1],
            }
            (directory / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))

    return Stopwatch


if __name__ == "__main__":
    from hf_fsdp_recipes.distributed import exit_with_message

    with exit_with_message():
        main()
