"""The steps.

Each runs in a process of its own, with the variables that `accelerate launch` sets for a rank.
"""

import importlib.metadata
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, TrainerCallback, trainer
from trl.scripts import sft as trl_sft

import hf_fsdp_recipes
from benchmarks.gpu_day.day import FULL, LORA, ROOT, Day, Figures
from benchmarks.gpu_day.watching import Stopwatch, synchronize
from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.loading.load_model import load_model
from hf_fsdp_recipes.metrics.metrics_file import read_metrics
from hf_fsdp_recipes.saving.callback import ShardedCheckpointCallback
from hf_fsdp_recipes.saving.host_copy import HostCopy, count_bytes, find_tensors
from hf_fsdp_recipes.saving.run import Run
from hf_fsdp_recipes.saving.saver import Saver
from hf_fsdp_recipes.training.arguments import parse_arguments
from hf_fsdp_recipes.upstream import patches
from hf_fsdp_recipes.weights.rows import local_part
from tests.ranks.memory import PeakMemory

PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "bitsandbytes")
NUM_REPEATS = 10


def probe(day: Day) -> Figures:
    """Return versions, and the fastest that this machine can multiply, copy and write."""
    found: Figures = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["cores"] = len(os.sched_getaffinity(0))
    found["disk GB/s"] = time_disk(day.work / "probe", 2 if day.is_small else 128)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if torch.cuda.is_available():
        fields = "name,memory.total,driver_version,power.limit"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        found["nvidia-smi"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    size = 64 if day.is_small else 8192
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    host = torch.empty(size, size, dtype=torch.bfloat16, pin_memory=torch.cuda.is_available())
    found["matmul TFLOP/s"] = 2 * size**3 / 1e12 / time_work(lambda: matrix @ matrix)
    found["device copy TB/s"] = 2 * matrix.nbytes / 1e12 / time_work(matrix.clone)
    found["device to host GB/s"] = matrix.nbytes / 1e9 / time_work(lambda: host.copy_(matrix))
    return found


def time_disk(file: Path, num_blocks: int) -> float:
    """Write a file in blocks of 16 MB; return GB/s until it is on disk."""
    block = os.urandom(1 << 24)
    started = time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(num_blocks):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    file.unlink()
    return num_blocks * len(block) / 1e9 / seconds


def time_work(work: Callable[[], Any]) -> float:
    """Return the seconds of one call, after some that do not count."""
    for _ in range(NUM_REPEATS):
        work()
    synchronize()
    started = time.perf_counter()
    for _ in range(NUM_REPEATS):
        work()
    synchronize()
    return (time.perf_counter() - started) / NUM_REPEATS


def load(day: Day, kind: str) -> Figures:
    """Load and shard the 8B model in bf16: with load_model, or as Trainer does."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # otherwise, all weights become float32
    patches.enable_cpu_ranks()
    accelerator = Accelerator()
    name = str(day.model("8b"))
    synchronize()
    model: torch.nn.Module
    with PeakMemory() as memory:
        if kind == "stock":
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        else:
            model = load_model(name, dtype="bfloat16")
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        synchronize()
    found = {"load s": memory.seconds, "host growth GB": memory.growth_bytes / 1e9}
    if torch.accelerator.is_available():
        found["device peak GB"] = torch.get_device_module().max_memory_allocated() / 1e9
    with torch.no_grad():
        logits = model(input_ids=torch.arange(32, device=accelerator.device)[None]).logits
    found["mean logsumexp, the same for both"] = float(logits.float().logsumexp(-1).mean())
    return found


def run_script(
    arguments: Sequence[str],
    callbacks: Sequence[TrainerCallback] = (),
    script: str = "recipes/sft.py",
) -> None:
    """Run recipes/sft.py or `trl sft` in this process, with more callbacks."""
    # Upstream's list holds classes, and Trainer takes instances too.
    default_callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    default_callbacks.extend(callbacks)
    patches.enable_cpu_ranks()
    if script == "trl sft":
        # Ours does not save here either.
        trainer.Trainer.save_model = lambda *args, **kwargs: None  # type: ignore[method-assign]
        trl_sft.main(*trl_sft.make_parser().parse_args_and_config(list(arguments)))
    else:
        runpy.run_path(str(ROOT / script))["main"](parse_arguments(list(arguments)))


def train(
    day: Day, model: str, name: str, settings: Mapping[str, Any], script: str = "recipes/sft.py"
) -> Figures:
    """Time the steps of a run, and compare the device's peak with the planner's prediction."""
    stopwatch = Stopwatch()
    started = time.perf_counter()
    own_settings = {} if script == "trl sft" else {"export": False}
    run_script(day.arguments(model, name, {**settings, **own_settings}), [stopwatch], script)
    found = stopwatch.figures
    found["whole run s"] = time.perf_counter() - started
    found["start to training s"] = stopwatch.began - started
    plan_file = day.out / "plan.json"
    if plan_file.exists() and "allocated peak GB" in found and not day.is_small:
        plan = json.loads(plan_file.read_text()).get(name.removesuffix("_trl"))
        if plan is not None:
            found["planned tensors GB"] = plan["tensors"]
            found["planned / allocated"] = plan["tensors"] / found["allocated peak GB"]
            found["planned total / used"] = plan["total"] / found["device used GB"]
    return found


class SaveWatch(TrainerCallback):
    """Asks for two saves, times the steps around them, and then kills this process."""

    def __init__(
        self, output: Path, num_steps: int, spans: dict[str, list[float]], facts: Figures
    ) -> None:
        self._num_steps = num_steps
        self._output = output
        self._spans = spans
        self._facts = facts
        self._seconds: dict[str, list[float]] = {}
        self._phase = "before"
        self._saved_step = 0
        self._phase_began = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        now = time.perf_counter()
        self._seconds.setdefault(self._phase, []).append(now - self._mark)
        self._mark = now
        step = state.global_step
        manifest = self._output / f"checkpoint-{self._saved_step}" / "manifest.json"
        if step == self._num_steps:
            self._begin("first save", step)
            self._saved_step = step
            control.should_save = True
        elif self._phase == "first save" and manifest.exists():
            self._begin("between", step)
        elif self._phase == "between" and step >= self._phase_began + self._num_steps:
            self._begin("second save", step)
            self._saved_step = step
            control.should_save = True
        elif self._phase == "second save" and manifest.exists():
            self._begin("after", step)
        elif self._phase == "after" and step >= self._phase_began + self._num_steps:
            report(self._figures())
            os.kill(os.getpid(), signal.SIGKILL)

    def _begin(self, phase: str, step: int) -> None:
        self._phase = phase
        self._phase_began = step

    def _figures(self) -> Figures:
        found: Figures = {}
        for phase, seconds in self._seconds.items():
            # The first steps of a run are slow, and the first one of a save contains the
            # standstill.
            steady = seconds[3:] if phase == "before" else seconds[1:]
            found[f"step s, {phase}: median, slowest, number"] = [
                statistics.median(steady or seconds),
                max(seconds),
                len(seconds),
            ]
        return found | self._spans | self._facts | {"last save at step": self._saved_step}


def save(day: Day, model: str, name: str, settings: Mapping[str, Any], num_steps: int) -> Figures:
    """Save twice, and time the steps around it: `num_steps` before, between and after.

    Ends with a kill.
    """
    spans: dict[str, list[float]] = {}
    facts: Figures = {"copied GB": [], "pinned": []}

    def time_calls(owner: type, name: str, label: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = original(*args, **kwargs)
            spans.setdefault(label, []).append(time.perf_counter() - started)
            if name == "take":
                describe_copy(result, facts)
            return result

        setattr(owner, name, timed)

    time_calls(Run, "save_checkpoint", "training stands still s")
    time_calls(HostCopy, "take", "of these, copying s")
    time_calls(Saver, "_write", "writing in the background s")
    watch = SaveWatch(day.output(name), 4 if day.is_small else num_steps, spans, facts)
    run_settings = {"max_steps": 590, "save_total_limit": 1, "packing_strategy": "wrapped"}
    run_script(day.arguments(model, name, {**settings, **run_settings}), [watch])
    return {"error": "the run ended before the second save", **spans, **facts}


def describe_copy(state: Any, facts: Figures) -> None:
    """Note the size of a copy of the state, and which share of it is pinned."""
    tensors = [local_part(tensor) for tensor in find_tensors(state)]
    num_bytes = count_bytes(tensors)
    num_pinned = 0
    if torch.cuda.is_available():
        num_pinned = count_bytes(tensor for tensor in tensors if tensor.is_pinned())
    facts["copied GB"].append(num_bytes / 1e9)
    facts["pinned"].append(num_pinned / num_bytes)


def resume(day: Day) -> Figures:
    """Resume the run that `save` killed, and export it in bf16."""
    output = day.output("save")
    found: Figures = {}
    started = time.perf_counter()
    callback_class: Any = ShardedCheckpointCallback
    export = callback_class.export
    begin = callback_class.on_train_begin
    step = max(int(path.name.split("-")[1]) for path in output.glob("checkpoint-*"))

    def timed_export(self: Any, *args: Any) -> None:
        began = time.perf_counter()
        export(self, *args)
        found["export s"] = time.perf_counter() - began

    def timed_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        found["start to training s, with verifying and loading"] = time.perf_counter() - started
        begin(self, *args, **kwargs)

    callback_class.export = timed_export
    callback_class.on_train_begin = timed_begin
    settings = FULL | {
        "packing_strategy": "wrapped",
        "max_steps": step + 4,
        "resume_from_checkpoint": "auto",
        "export_dtype": "bfloat16",
    }
    run_script(day.arguments("1b", "save", settings))
    files = (output / "export").glob("*.safetensors")
    found["export GB"] = sum(file.stat().st_size for file in files) / 1e9
    return found | {"resumed from": step}


def train_exactly(day: Day, run: str, is_killed: bool) -> Figures:
    """Train for ten steps with deterministic kernels, and save at step 4.

    Kill this process after step 8 if asked to.

    Returns each step's loss and gradient norm. Run again, it resumes.
    """
    # cuBLAS and flash attention are deterministic only with these.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    output = day.output(run)
    if distributed.world_size() > 1 and torch.accelerator.is_available():
        # Two ranks on one accelerator need gloo, which cannot send what is on an accelerator.
        hf_fsdp_recipes.load_model = lambda *args, **kwargs: load_model(
            *args, **kwargs, source="direct"
        )

    class Killer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if is_killed and state.global_step == 8:
                while not (output / "checkpoint-4" / "manifest.json").exists():
                    time.sleep(0.01)
                report({"killed after step": 8})
                os.kill(os.getpid(), signal.SIGKILL)

    settings = FULL | {
        "learning_rate": 1e-3,
        "max_steps": 10,
        "max_length": min(day.length, 1024),
        "packing_strategy": "wrapped",
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 1,
        "resume_from_checkpoint": "auto",
    }
    if distributed.world_size() > 1:
        settings |= {"ddp_backend": "gloo"}
    run_script(day.arguments("190m", run, settings), [Killer()])
    entries = [entry for entry in read_metrics(output / "metrics.jsonl") if "loss" in entry]
    steps = {entry["step"]: [entry["loss"], entry["grad_norm"]] for entry in entries}
    return {"steps": steps}


def command(day: Day) -> Figures:
    """Run the command that a user types.

    LoRA of 1B with saves, the merged export and the report.
    """
    output = day.output("command")
    settings = LORA | {
        "save_strategy": "steps",
        "save_steps": 5,
        "max_steps": 10,
        "merge_adapter": True,
    }
    template = "full_shard" if torch.accelerator.is_available() else "cpu"
    words = [sys.executable, "-m", "hf_fsdp_recipes.cli", "sft"]
    words += ["--accelerate_config", template, "--num_processes", "1", "--main_process_port", "0"]
    words += day.arguments("1b", "command", settings)
    of_a_rank = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in of_a_rank and not key.startswith(("ACCELERATE_", "FSDP_"))
    }
    started = time.perf_counter()
    exit_status = subprocess.run(words, env=environment).returncode
    found: Figures = {"exit status": exit_status, "command s": time.perf_counter() - started}
    if exit_status:
        found["error"] = "see log.txt"
    for name in ("report.md", "export", "export_merged", "checkpoint-10"):
        found[name] = (output / name).exists()
    return found


def report(figures: Figures) -> None:
    """Give this process's figures to the one that started it."""
    Path(os.environ["GPU_DAY_RESULT"]).write_text(json.dumps(figures))
