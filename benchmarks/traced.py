"""Runs an unchanged training script on one rank, traces its last step, and measures the other steps from outside.

    accelerate launch --config_file TEMPLATE benchmarks/traced.py RESULT_DIRECTORY recipes/sft.py --config X.yaml

Writes `trace.json.gz` for Perfetto, and `wall.json` with the seconds of the steps after the first WARMUP_STEPS and before the
last one, logging and callbacks included.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

WARMUP_STEPS = 5


def main() -> None:
    from transformers import trainer

    directory, script, *arguments = sys.argv[1:]
    trainer.DEFAULT_CALLBACKS.append(tracer_class(Path(directory)))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def tracer_class(directory: Path) -> type:
    """Return a TrainerCallback that traces the last step and measures the time of training."""
    import torch
    from transformers import TrainerCallback

    def now() -> float:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    class Tracer(TrainerCallback):
        def __init__(self) -> None:
            self.started = self.ended = 0.0
            self.profiler: Any = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == state.max_steps - 1:
                self.profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
                self.profiler.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARMUP_STEPS:
                self.started = now()
            elif state.global_step == state.max_steps - 1:
                self.ended = now()
            elif self.profiler is not None:
                now()
                self.profiler.stop()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (directory / "wall.json").write_text(json.dumps({"seconds": self.ended - self.started}))
            if self.profiler is not None:
                self.profiler.export_chrome_trace(str(directory / "trace.json.gz"))

    return Tracer


if __name__ == "__main__":
    main()
