"""MetricsCallback: a TrainerCallback that writes what happened into metrics.jsonl, and the report at the end.

One JSON object a logged step. Works beside Trainer's own `report_to`; asks nothing of the ranks but one small
gather where Trainer already gathers its loss.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp_recipes import ranks
from hf_fsdp_recipes.measure import probes, report, stages

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricsCallback(TrainerCallback):
    """Write `<output_dir>/metrics.jsonl`, and `report.md` with plots when training ends."""

    def __init__(self) -> None:
        self._last_time = 0.0
        self._last_step = 0
        self._last_tokens = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock; drop what a resumed run will measure again."""
        self._last_time, self._last_step = time.perf_counter(), state.global_step
        if ranks.is_main():
            path = Path(args.output_dir) / METRICS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [entry for entry in report.read_metrics(path) if entry.get("step", 0) <= state.global_step]
            kept += [stage.as_metrics() for stage in stages.gathered]
            path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        stages.gathered.clear()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write one line. Collective: every rank must call this (Trainer does)."""
        logs = kwargs.get("logs") or {}
        if "loss" not in logs and "eval_loss" not in logs:
            return
        host = ranks.gather_objects(probes.host_bytes())
        device = ranks.gather_objects(probes.device_bytes())
        if not ranks.is_main():
            return
        now = time.perf_counter()
        num_steps = state.global_step - self._last_step
        entry: dict[str, Any] = {"step": state.global_step, "epoch": state.epoch}
        entry |= {key: value for key, value in logs.items() if isinstance(value, int | float)}
        if num_steps > 0:
            entry["step_seconds"] = (now - self._last_time) / num_steps
            tokens = float(logs.get("num_tokens", 0.0))
            if tokens > self._last_tokens and self._last_tokens > 0:
                entry["tokens_per_second"] = (tokens - self._last_tokens) / (now - self._last_time)
            self._last_tokens, self._last_step, self._last_time = tokens, state.global_step, now
        entry["host_bytes"] = host
        entry["device_bytes"] = [allocated for allocated, _ in device]
        entry["device_peak_bytes"] = [peak for _, peak in device]
        with (Path(args.output_dir) / METRICS_FILE).open("a") as stream:
            stream.write(json.dumps(entry) + "\n")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the report. A report that cannot be written costs a warning, never the run."""
        if not ranks.is_main():
            return
        try:
            report.write_report(Path(args.output_dir))
        except Exception as error:
            logger.warning("no report: %s", error)
