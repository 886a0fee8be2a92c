"""MetricsCallback: a TrainerCallback that writes what happened into metrics.jsonl, and the report at the end.

One JSON object a logged step. Works beside Trainer's own `report_to`. Costs a step some marks of a clock and a count
of its tokens, which waits for nothing; the ranks exchange 14 numbers where Trainer already gathers its loss.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.metrics import aggregate, memory, metrics_file, peak_flops, report, stages
from hf_fsdp_recipes.metrics.clock import clock
from hf_fsdp_recipes.metrics.flops import ModelFlops, count_flops
from hf_fsdp_recipes.metrics.token_count import count_work

logger = logging.getLogger(__name__)

MODEL_FILE = "model.txt"
MAX_LINES_PRINTED = 60
SHOWN_IN_LOGS = ("tokens_per_second", "tokens_per_second_per_device", "mfu", "hfu")


class MetricsCallback(TrainerCallback):
    """Write `<output_dir>/metrics.jsonl`, and `report.md` with plots when training ends.

    Add it to a stock `Trainer` or `SFTTrainer` when that is built, on every rank. `place_before_reporters` lets
    wandb, trackio and tensorboard see what it measures.

    Args:
        throughput_warmup_steps: steps after each start that are left out of the averages, because kernels are
            chosen and caches filled in them.
    """

    def __init__(self, *, throughput_warmup_steps: int = 3) -> None:
        self._warmup_steps = throughput_warmup_steps
        self._flops: ModelFlops | None = None
        self._reason = ""  # why there is no MFU
        self._num_parameters = 0
        self._speed = aggregate.Speed()
        self._memory = memory.DeviceMemory()
        self._work = torch.zeros(aggregate.NUM_WORK, dtype=torch.int64)
        self._hook: Any = None
        self._start_step = self._window_step = 0
        self._measured: list[dict[str, Any]] = []  # since this start: what the averages are made of

    # Trainer's events, in the order of a run.

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the model's FLOPs while it is whole. No collective."""
        self._count_model(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start to measure; drop what a resumed run will measure again. No collective."""
        model = kwargs["model"]
        if self._flops is None and not self._reason:
            self._count_model(model)
        device = memory.find_device_module(args.device)
        facts = self._describe(args, state, model, device) | _count_rows(kwargs.get("train_dataloader"))
        if distributed.is_main():
            begun = [stage.as_metrics() for stage in stages.gathered]
            metrics_file.begin(self._path(args), state.global_step, [*begun, facts])
            _show_model(model, Path(args.output_dir))
        stages.gathered.clear()
        self._memory = memory.DeviceMemory(device)
        self._work = torch.zeros(aggregate.NUM_WORK, dtype=torch.int64, device=args.device)
        self._hook = model.register_forward_pre_hook(self._count_batch, with_kwargs=True)
        self._start_step = self._window_step = state.global_step
        self._measured = []
        self._memory.take()
        clock.start(device)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the wait for data, and the warm-up."""
        clock.mark("data")
        if self._window_step < state.global_step == self._start_step + self._warmup_steps:
            self._begin_window(state)
            clock.drop()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End a forward and backward pass."""
        clock.mark("forward_backward")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End a forward and backward pass; clipping has been counted with it."""
        clock.mark("forward_backward")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the optimizer's step."""
        clock.mark("optimizer")
        self._memory.sample()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write one line, and add throughput to the logs. Collective: every rank must call this (Trainer does)."""
        logs = kwargs.get("logs") or {}
        if "train_runtime" in logs:
            logs |= {f"average_{name}": value for name, value in aggregate.average(self._measured).items()}
        entry: dict[str, Any] = {"step": state.global_step, "epoch": state.epoch}
        entry |= {key: value for key, value in logs.items() if isinstance(value, int | float)}
        if "loss" in logs:
            entry |= self._measure(args, state)
            logs |= {name: entry[name] for name in SHOWN_IN_LOGS if name in entry}
        if distributed.is_main():
            metrics_file.append(self._path(args), entry)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End an evaluation."""
        clock.mark("evaluation")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End Trainer's own save; ShardedCheckpointCallback marks its own."""
        clock.mark("save")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the report. A report that cannot be written costs a warning, never the run."""
        clock.mark("other")
        seconds = clock.take()
        clock.stop()
        self._remove_hook()
        if not distributed.is_main():
            return
        step = state.global_step
        # What went on after the last log.
        end = {"step": step, "ended_at_step": step, "num_steps": 0, "seconds": seconds}
        metrics_file.append(self._path(args), end)
        try:
            report.write_report(Path(args.output_dir))
        except Exception as error:
            logger.warning("no report: %s", error)

    # What the events have in common.

    def _path(self, args: TrainingArguments) -> Path:
        return Path(args.output_dir) / metrics_file.METRICS_FILE

    def _count_model(self, model: torch.nn.Module) -> None:
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        try:
            self._flops = count_flops(model)
        except Exception as error:  # a model of another library may look like anything
            self._reason = str(error)

    def _count_batch(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        try:
            self._work += count_work(kwargs, self._flops.window if self._flops else None).to(self._work.device)
        except Exception as error:
            logger.warning("tokens are not counted: %s", error)
            self._remove_hook()

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _measure(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        clock.mark("other")
        measured = aggregate.RankWindow(memory.host_bytes(), *self._memory.take(), clock.take())
        rows = distributed.gather_integers(aggregate.pack(self._work, measured))
        is_warmup = state.global_step <= self._start_step + self._warmup_steps
        entry = aggregate.summarize(rows, state.global_step - self._window_step, self._speed)
        self._begin_window(state)
        if is_warmup:
            entry["is_warmup"] = True
        self._measured.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
        return entry

    def _begin_window(self, state: TrainerState) -> None:
        self._window_step = state.global_step
        self._work.zero_()

    def _describe(
        self, args: TrainingArguments, state: TrainerState, model: torch.nn.Module, device: Any
    ) -> dict[str, Any]:
        """Return the facts of this start, and note what MFU needs."""
        from accelerate.state import AcceleratorState

        accelerate = AcceleratorState()
        plugin = getattr(accelerate, "fsdp_plugin", None)
        name = device.get_device_name() if hasattr(device, "get_device_name") else args.device.type
        dtype = peak_flops.matmul_dtype(str(accelerate.mixed_precision), model)
        peak = peak_flops.find_peak_flops(name, dtype)
        asked = [getattr(args, name, False) for name in ("activation_checkpointing", "gradient_checkpointing")]
        is_recomputed = any(asked) or bool(getattr(plugin, "activation_checkpointing", False))
        self._speed = aggregate.Speed(self._flops, peak, is_recomputed)
        facts = {
            "run": args.run_name or Path(args.output_dir).name,
            "model": getattr(model.config, "_name_or_path", "") if hasattr(model, "config") else "",
            "from_step": state.global_step,
            "max_steps": state.max_steps,
            "num_ranks": distributed.world_size(),
            "device": name,
            "dtype": dtype,
            "num_parameters": self._num_parameters,
            "batch_per_device": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "is_recomputed": is_recomputed,
            "peak_flops": peak,
            "throughput_warmup_steps": self._warmup_steps,
        }
        if self._flops is not None:
            facts["matmul_parameters"] = self._flops.matmul_parameters
        if peak is None or self._flops is None:
            facts["no_mfu"] = self._reason or f"no dense {dtype} peak is known for {name}"
        return facts


def place_before_reporters(trainer: Any) -> None:
    """Let the callbacks of `report_to` see tokens a second and MFU, if `trainer` has a MetricsCallback. No collective.

    Trainer hands one dict of logs from callback to callback, those of `report_to` before any that it was given.
    Source: transformers 5.23, `Trainer.__init__` (order) and `CallbackHandler.on_log` (the same dict for all).
    """
    callbacks = trainer.callback_handler.callbacks
    callbacks.sort(key=lambda callback: not isinstance(callback, MetricsCallback))


def _count_rows(dataloader: Any) -> dict[str, int]:
    """Return how many sequences an epoch has; nothing for a stream."""
    dataset: Any = getattr(dataloader, "dataset", None)
    return {"num_rows": len(dataset)} if hasattr(dataset, "__len__") else {}


def _show_model(model: torch.nn.Module, output_dir: Path) -> None:
    """Print the model as it trains, layers that repeat folded; a long one goes into a file. Main rank only."""
    lines = repr(model).splitlines()
    if len(lines) <= MAX_LINES_PRINTED:
        print("\n".join(lines), flush=True)
        return
    (output_dir / MODEL_FILE).write_text("\n".join(lines) + "\n")
    print(f"model: {lines[0].rstrip('(')}, {len(lines)} lines, in {output_dir / MODEL_FILE}", flush=True)
