"""`MetricsCallback` measures a Trainer's steps and writes metrics.jsonl and the report."""

import logging
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.metrics import aggregate, memory, metrics_file, peak_flops, report, stages
from hf_fsdp_recipes.metrics.clock import clock
from hf_fsdp_recipes.metrics.flops import ModelFlops, count_flops, count_tokens
from hf_fsdp_recipes.metrics.metrics_file import Entry

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from transformers import Trainer

logger = logging.getLogger(__name__)

MODEL_FILE = "model.txt"
MAX_LINES_PRINTED = 60
LOGGED = ("tokens_per_second", "tokens_per_second_per_device", "mfu", "hfu", "step_seconds")
MIN_SAVE_SECONDS = 1e-3  # a shorter time means that no save was due
LOGGED_MEMORY = {"host_memory_gb": "host_bytes", "device_peak_memory_gb": "device_peak_bytes"}


def _mark(phase: str) -> Callable[..., None]:
    """Return a handler for one of Trainer's events that ends `phase`."""
    return lambda self, args, state, control, **kwargs: clock.mark(phase)


class MetricsCallback(TrainerCallback):
    """Measure throughput, MFU and memory of a Trainer, and write a report with plots.

    Works with a stock `Trainer` or a TRL trainer. Pass it to the trainer's constructor on every rank:

        trainer = Trainer(..., callbacks=[MetricsCallback()])

    In the run's output directory it writes

    - `metrics.jsonl` during training: one JSON object per logged step with Trainer's logs, tokens without padding,
      time per phase of a step, throughput, MFU, and the memory of every rank;
    - `report.md`, `loss.png`, `throughput.png` and `memory.png` at the end. `hf-fsdp report` rewrites them at any time.

    It also adds throughput, MFU, times and memory to Trainer's logs (docs/trackers.md lists them), and the average throughput
    and MFU to the final log. Call `place_before_reporters(trainer)` so that wandb, TensorBoard and other trackers log them too.

    Steps that are not logged cause no synchronization. At a logged step, 14 integers per rank are gathered, right after
    Trainer has gathered the loss. A failure to count tokens or to write a file is logged as a warning. Files are written
    from the first step on, after `ShardedCheckpointCallback` has locked and checked the output directory.

    Args:
        throughput_warmup_steps: number of steps after each start or resume to exclude from the averages.
    """

    def __init__(self, *, throughput_warmup_steps: int = 3) -> None:
        self._warmup_steps = throughput_warmup_steps
        self._flops: ModelFlops | None = None
        self._no_flops_reason = ""
        self._num_parameters = 0
        self._mfu_inputs = aggregate.MfuInputs()
        self._memory = memory.DeviceMemory()
        self._counts = torch.zeros(aggregate.NUM_COUNTS, dtype=torch.int64)
        self._hook: RemovableHandle | None = None
        self._start_step = self._logged_step = 0
        self._measured: list[Entry] = []  # entries since the last start or resume, for the averages
        self._load_seconds: float | None = None  # None once it is logged
        # Entries that describe the current start or resume; written at its first step.
        self._first_entries: list[Entry] | None = None
        self._is_recording = False  # true on rank 0, from the first step on
        self._can_write = True

    # Trainer's events, in the order of a run.

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the model's FLOPs before the model is sharded."""
        self._count_model(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start measuring. Files are written from the first step on; see `_begin`."""
        model = kwargs["model"]
        if self._flops is None and not self._no_flops_reason:
            self._count_model(model)
        device = None if args.device.type == "cpu" else torch.get_device_module(args.device)
        start = self._describe_run(args, state, model, device)
        dataset = getattr(kwargs.get("train_dataloader"), "dataset", None)
        if isinstance(dataset, Sized):  # not a stream
            start["num_rows"] = len(dataset)
        self._first_entries, self._is_recording = [*map(asdict, stages.gathered), start], False
        self._load_seconds = stages.count_seconds(stages.gathered)
        stages.gathered.clear()
        self._memory = memory.DeviceMemory(device)
        self._counts = torch.zeros(aggregate.NUM_COUNTS, dtype=torch.int64, device=args.device)
        self._hook = model.register_forward_pre_hook(self._count_batch, with_kwargs=True)
        self._start_step = self._logged_step = state.global_step
        self._measured = []
        self._memory.pop()
        clock.start(device)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the data phase. If the warm-up ends between two logged steps, discard its measurements."""
        self._begin(args, state, kwargs["model"])
        clock.mark("data")
        if self._logged_step < state.global_step == self._start_step + self._warmup_steps:
            self._reset_counts(state)
            clock.reset()

    on_substep_end = _mark("forward_backward")
    on_pre_optimizer_step = _mark("forward_backward")  # includes gradient clipping

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the optimizer phase."""
        clock.mark("optimizer")
        self._memory.sample_valley()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write an entry to metrics.jsonl, and add throughput and memory to Trainer's logs.

        Collective: every rank must call this (Trainer does).
        """
        logs = kwargs.get("logs") or {}
        if "train_runtime" not in logs:
            self._begin(args, state, kwargs["model"])  # eval_on_start logs before the first step
        else:
            logs |= {f"average_{name}": value for name, value in aggregate.average(self._measured).items()}
        entry: Entry = {"step": state.global_step, "epoch": state.epoch, **_numbers(logs)}
        if "loss" in logs:
            entry |= self._measure(state)
            logs |= _select_logged(entry)
            if self._load_seconds is not None:
                logs["load_seconds"], self._load_seconds = self._load_seconds, None
        self._append(args, entry)

    on_evaluate = _mark("evaluation")
    on_save = _mark("save")  # after Trainer's saves; ShardedCheckpointCallback marks its own saves

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the time since the last logged step to metrics.jsonl, and write the report."""
        clock.mark("other")
        seconds = clock.pop()
        clock.stop()
        self._remove_hook()
        step = state.global_step
        self._append(args, {"step": step, "ended_at_step": step, "num_steps": 0, "seconds": seconds})
        if not self._is_recording:
            return
        try:
            report.write_report(Path(args.output_dir))
        except Exception as error:  # a finished run must not fail because of its report
            logger.warning("cannot write the report: %s", error)

    def _begin(self, args: TrainingArguments, state: TrainerState, model: torch.nn.Module) -> None:
        """Prepare metrics.jsonl and print the model, once after each start or resume.

        Drops the entries of steps that a resumed run will repeat, and appends `_first_entries`.
        """
        if self._first_entries is None:
            return
        entries, self._first_entries, self._is_recording = self._first_entries, None, distributed.is_main()
        output_dir = Path(args.output_dir)
        self._write(lambda: metrics_file.begin(output_dir / metrics_file.METRICS_FILE, state.global_step, entries))
        self._write(lambda: _print_model(model, output_dir))

    def _append(self, args: TrainingArguments, entry: Entry) -> None:
        self._write(lambda: metrics_file.append(Path(args.output_dir) / metrics_file.METRICS_FILE, entry))

    def _write(self, write: Callable[[], None]) -> None:
        """Write a file on rank 0. Log the first failure as a warning instead of raising it, so that metrics never end a run."""
        if not self._is_recording:
            return
        try:
            write()
        except OSError as error:
            if self._can_write:
                logger.warning("metrics are incomplete, because a file cannot be written: %s", error)
            self._can_write = False

    def _count_model(self, model: torch.nn.Module) -> None:
        self._num_parameters = sum(_num_elements(parameter) for parameter in model.parameters())
        try:
            self._flops = count_flops(model)
        except Exception as error:  # models from outside transformers may raise anything
            self._no_flops_reason = str(error)

    def _count_batch(self, module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        try:
            self._counts += count_tokens(kwargs, self._flops.window if self._flops else None).to(self._counts.device)
        except Exception as error:
            logger.warning("cannot count tokens; throughput will be missing: %s", error)
            self._remove_hook()

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _measure(self, state: TrainerState) -> Entry:
        clock.mark("other")
        memory_bytes = (memory.host_bytes(), *self._memory.pop())
        rows = distributed.gather_integers(aggregate.pack(self._counts, memory_bytes, clock.pop()))
        entry = aggregate.summarize(rows, state.global_step - self._logged_step, self._mfu_inputs)
        self._reset_counts(state)
        if state.global_step <= self._start_step + self._warmup_steps:
            entry["is_warmup"] = True
        self._measured.append(_numbers(entry))
        return entry

    def _reset_counts(self, state: TrainerState) -> None:
        self._logged_step = state.global_step
        self._counts.zero_()

    def _describe_run(
        self, args: TrainingArguments, state: TrainerState, model: torch.nn.Module, device: ModuleType | None
    ) -> Entry:
        """Return the entry of metrics.jsonl that describes this start of the run, and set the inputs for computing MFU."""
        from accelerate.state import AcceleratorState

        accelerate = AcceleratorState()
        plugin = getattr(accelerate, "fsdp_plugin", None)
        name = (
            device.get_device_name() if device is not None and hasattr(device, "get_device_name") else args.device.type
        )
        dtype = peak_flops.matmul_dtype(str(accelerate.mixed_precision), model)
        peak = peak_flops.find_peak_flops(name, dtype)
        flags = [getattr(args, flag, False) for flag in ("activation_checkpointing", "gradient_checkpointing")]
        is_recomputed = any(flags) or bool(getattr(plugin, "activation_checkpointing", False))
        self._mfu_inputs = aggregate.MfuInputs(self._flops, peak, is_recomputed)
        start = {
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
            start["matmul_parameters"] = self._flops.matmul_parameters
        if peak is None or self._flops is None:
            start["no_mfu"] = self._no_flops_reason or f"no {dtype} peak FLOP/s known for {name}"
        return start


def place_before_reporters(trainer: "Trainer") -> None:
    """Move MetricsCallback before the callbacks of `report_to`, so that they log its throughput and MFU.

    Trainer passes the same dict of logs to all callbacks, and calls those of `report_to` before user callbacks. Call this
    on every rank before training; it has no effect without a MetricsCallback.

    Source: transformers 5.23, `Trainer.__init__` (order) and `CallbackHandler.on_log` (one dict for all).
    """
    callbacks = list(trainer.callback_handler.callbacks)
    if any(isinstance(callback, MetricsCallback) for callback in callbacks):
        for callback in callbacks:
            if not isinstance(callback, MetricsCallback):
                trainer.remove_callback(callback)
                trainer.add_callback(callback)


def _num_elements(parameter: torch.nn.Parameter) -> int:
    """Return the number of weights; a 4-bit parameter packs two weights into a byte."""
    is_4bit = type(parameter).__name__ == "Params4bit"
    return parameter.numel() * (2 * parameter.element_size() if is_4bit else 1)


def _select_logged(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the values in an entry that go to trackers; each memory figure is the maximum over the ranks."""
    logged = {name: entry[name] for name in LOGGED if name in entry}
    logged |= {name: max(entry[key]) / 1e9 for name, key in LOGGED_MEMORY.items() if any(entry[key])}
    save_seconds = entry["seconds"]["save"]
    return logged | ({"save_seconds": save_seconds} if save_seconds > MIN_SAVE_SECONDS else {})


def _numbers(entry: Mapping[str, Any]) -> dict[str, int | float]:
    return {key: value for key, value in entry.items() if isinstance(value, int | float)}


def _print_model(model: torch.nn.Module, output_dir: Path) -> None:
    """Print the wrapped model with repeated layers folded, or write it to a file if it is long. Rank 0 only."""
    lines = repr(model).splitlines()
    if len(lines) <= MAX_LINES_PRINTED:
        print("\n".join(lines), flush=True)
        return
    (output_dir / MODEL_FILE).write_text("\n".join(lines) + "\n")
    print(f"model: {lines[0].rstrip('(')}, printed to {output_dir / MODEL_FILE} ({len(lines)} lines)", flush=True)
