"""`MetricsCallback` measures a Trainer's steps and writes metrics.jsonl and the report."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch.nn import Module
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import describe
from hf_fsdp_recipes.metrics import flops, memory, metrics_file, report
from hf_fsdp_recipes.metrics.metrics_file import PHASES, RATES, TRAINING, Entry
from hf_fsdp_recipes.upstream.accelerate_internals import PRECISIONS

logger = logging.getLogger(__name__)

# {name in metrics.jsonl: name in Trainer's logs}
LOGGED = {
    **{name: name for name in ("step_seconds", *RATES)},
    "host_bytes": "host_memory_gb",
    "device_peak_bytes": "device_peak_memory_gb",
}


class MetricsCallback(TrainerCallback):
    """Measures throughput, MFU and memory of any Trainer.

    It writes metrics.jsonl and a report with plots (docs/tools.md).

    Pass the callback to the trainer's constructor on every rank. It also adds the main figures to
    Trainer's logs. At steps that are not logged, it never synchronizes with the device. At a
    logged step, right after Trainer has gathered the loss, the callback gathers a few integers
    from each rank. If it cannot count tokens or write a file, it logs a warning once.

    Args:
        throughput_warmup_steps: number of steps after each start or resume that are left out of
            averages.
    """

    _host_bytes: int

    def __init__(self, *, throughput_warmup_steps: int = 3) -> None:
        self._warmup_steps = throughput_warmup_steps
        self._is_running = False
        self._has_warned = False
        self._peak_flops = 0.0  # unknown

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Start measuring."""
        start = _describe_run(args, state, model)
        # A stream has no length. Accelerate's shard of it raises an error.
        with suppress(Exception):
            start["num_rows"] = len(kwargs["train_dataloader"].dataset)
        try:
            self._flops = flops.find_model_flops(model)
            start |= self._flops._asdict()
            self._peak_flops = flops.find_peak_flops(start["device"], start["dtype"])
        except Exception as error:  # models from outside transformers may raise anything
            start["no_mfu"] = str(error)
        self._start: Entry | None = start  # until it is written
        self._file = Path(str(args.output_dir)) / metrics_file.METRICS_FILE
        self._warm_at_step = state.global_step + self._warmup_steps
        self._is_running = True
        self._counts = torch.zeros(2, dtype=torch.int64, device=args.device)
        self._hook = model.register_forward_pre_hook(
            self._count_batch,
            with_kwargs=True,
        )
        memory.pop_device_bytes(args.device)
        self._begin_interval(state)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: object,
        **kwargs: object,
    ) -> None:
        """End the data phase.

        If the warm-up ends between two logged steps, discard what was measured so far.
        """
        self._end_phase("data")
        if self._logged_step < state.global_step == self._warm_at_step:
            self._begin_interval(state)

    def on_pre_optimizer_step(self, *_: object, **kwargs: object) -> None:
        """End the forward and backward phase of all micro-batches, which includes clipping.

        Sample the host memory while the gradients exist.
        """
        self._end_phase("forward_backward")
        self._host_bytes = max(self._host_bytes, memory.host_bytes())

    def on_step_end(self, *_: object, **kwargs: object) -> None:
        """End the optimizer phase."""
        self._end_phase("optimizer")

    def on_evaluate(self, *_: object, **kwargs: object) -> None:
        """End the evaluation phase."""
        self._end_phase("evaluation")

    def on_save(self, *_: object, **kwargs: object) -> None:
        """End the save phase. It excludes the part of a save that runs in the background."""
        self._end_phase("save")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **kwargs: object,
    ) -> None:
        """Write an entry to metrics.jsonl, and add figures to Trainer's logs.

        Collective: Trainer calls this on every rank.
        """
        if not self._is_running:
            return
        entry: Entry = {
            name: value for name, value in logs.items() if isinstance(value, int | float)
        }
        entry["step"] = state.global_step
        if "loss" in logs:
            entry |= self._measure(state)
            flat = metrics_file.flatten(entry)
            logs |= {LOGGED[name]: flat[name] for name in LOGGED if flat.get(name)}
        self._append(entry)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: object,
        **kwargs: object,
    ) -> None:
        """Write the last entry. Then write the report."""
        self._is_running = False
        self._hook.remove()
        self._append({"step": state.global_step, "ended_at_step": state.global_step})
        if distributed.is_main():
            with self._errors_as_warnings():
                report.write_report(self._file.parent)

    def _begin_interval(self, state: TrainerState) -> None:
        """Start the interval that the next entry of metrics.jsonl covers."""
        self._logged_step = state.global_step
        self._host_bytes = 0
        self._phase_began_at = perf_counter()
        # {phase: seconds since the last logged step}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._counts.zero_()

    def _end_phase(self, phase: str) -> None:
        """End a phase. Its time grows by the host time since the previous phase ended."""
        if self._is_running:
            now = perf_counter()
            self._seconds[phase] += now - self._phase_began_at
            self._phase_began_at = now

    def _measure(self, state: TrainerState) -> Entry:
        """Return what all ranks measured since the last logged step. Collective."""
        self._end_phase("other")
        own = {
            "counts": self._counts.tolist(),
            "host_bytes": self._host_bytes,
            **memory.pop_device_bytes(self._counts.device),
        }
        ranks = distributed.gather(own)
        entry: Entry = {name: [rank[name] for rank in ranks] for name in own}
        tokens, pairs = torch.tensor(entry.pop("counts")).sum(dim=0).tolist()
        seconds = sum(self._seconds[phase] for phase in TRAINING)
        num_steps = state.global_step - self._logged_step
        entry |= {
            "tokens": tokens,
            "num_steps": num_steps,
            "seconds": self._seconds,
            "step_seconds": seconds / max(1, num_steps),
        }
        if tokens:
            entry["tokens_per_second"] = tokens / seconds
            entry["tokens_per_second_per_device"] = tokens / seconds / len(ranks)
        if self._peak_flops:
            entry["mfu"] = self._flops.training(tokens, pairs) / (
                self._peak_flops * seconds * len(ranks)
            )
        if state.global_step <= self._warm_at_step:
            entry["is_warmup"] = True
        self._begin_interval(state)
        return entry

    def _count_batch(
        self,
        module: Module,
        args: object,
        kwargs: Any,
    ) -> None:
        if module.training and torch.is_grad_enabled():
            with self._errors_as_warnings():
                self._counts.add_(flops.count_tokens(kwargs).to(self._counts.device))

    def _append(self, entry: Entry) -> None:
        # The first entry starts the file. So a run that is refused before its first step does not
        # change an earlier file.
        if distributed.is_main():
            with self._errors_as_warnings():
                if self._start:
                    metrics_file.begin(self._file, self._start)
                    self._start = None
                metrics_file.append(self._file, entry)

    @contextmanager
    def _errors_as_warnings(self) -> Iterator[None]:
        """Let errors of the body not end the run.

        The first one is logged as a warning, and later ones are ignored.
        """
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                logger.warning("metrics are incomplete: %s", describe(error))
            self._has_warned = True


def _describe_run(
    args: TrainingArguments,
    state: TrainerState,
    model: Module,
) -> Entry:
    """Return the entry that is written to metrics.jsonl each time the run starts or resumes."""
    model_name = Path(
        getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    ).name
    dtype = PRECISIONS.get(AcceleratorState().mixed_precision, next(model.parameters()).dtype)
    get_device_name = getattr(
        torch.get_device_module(args.device), "get_device_name", lambda: args.device.type
    )
    per_node = int(os.getenv("LOCAL_WORLD_SIZE", "1"))
    length = f"{args.max_steps}steps" if args.max_steps > 0 else f"{args.num_train_epochs:g}"
    return {
        # The format is from AMD's article on FSDP with ROCm:
        # fsdp_training_DATE_MODEL_NODES_GPUS-PER-NODE_EPOCHS_BATCH.
        "run": args.run_name
        or (
            f"fsdp_training_{datetime.now():%Y%m%d-%H%M}_{model_name}_"
            f"{distributed.world_size() // per_node}_{per_node}_{length}_"
            f"{args.per_device_train_batch_size}"
        ),
        "model": model_name,
        "from_step": state.global_step,
        "max_steps": state.max_steps,
        "num_ranks": distributed.world_size(),
        "device": get_device_name(),
        "dtype": str(dtype).removeprefix("torch."),
        "batch_per_device": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
    }
