"""Measures on one node's accelerators what CPU ranks cannot show, on machines that are available for a few minutes.

    make gpu-day [OUT=runs/gpu-day] [MODELS=runs/gpu-day-models] [MINUTES=9] [AGAIN=full_1b]

Each measurement has its own process and a line in OUT/results.jsonl, so that a crash loses only one. A call ends before MINUTES
are over and prints what is left; the next call goes on. OUT/report.md has all figures. All models have random weights; they take
20 GB in MODELS. `--scale small` measures tiny models, also on the emulated accelerator, to test this script.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.running import llama_config, machine

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "accelerate_configs" / "full_shard.yaml"
SMALL_PARAMETERS, LOAD_REPEATS = 3e6, 3
NUM_STEPS, SAVE_STEPS, LIMIT_SECONDS = 12, 6, 1200.0
KINDS = ("from_pretrained", "rank0", "direct")
LORA = {"use_peft": True, "lora_target_modules": "all-linear", "dtype": "bfloat16", "learning_rate": 1e-4}
QLORA = LORA | {"load_in_4bit": True, "use_bnb_nested_quant": True}
FULL = {"dtype": "float32", "learning_rate": 1e-5}
RECOMPUTED = {"gradient_checkpointing": True}
Figures = dict[str, Any]


@dataclass(frozen=True)
class Day:
    """What a measurement needs: directories, and how large the models are."""

    out: Path
    models: Path
    is_small: bool
    num_processes: int

    def model(self, num_parameters: float) -> Path:
        """Return a random Llama in bf16, with a tokenizer and rows; make it first if it is not there."""
        from argparse import Namespace

        from benchmarks.running import make_checkpoint
        from benchmarks.step import write_model_and_rows

        size = SMALL_PARAMETERS if self.is_small else num_parameters
        directory = self.models / f"llama-{size:g}"
        if not (directory / "rows").is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            write_model_and_rows(Namespace(parameters=SMALL_PARAMETERS, steps=4 * NUM_STEPS), directory)
            config = llama_config(size)
            config.vocab_size = 32000
            for file in ("config.json", "model.safetensors"):
                (directory / "model" / file).unlink()
            make_checkpoint(directory / "model", size, config=config)
        return directory

    def run(
        self, directory: Path, output: Path, settings: dict[str, Any], is_done: Callable[[], bool] = lambda: False
    ) -> None:
        """Run recipes/sft.py on all accelerators to its end, or kill it when `is_done`."""
        from hf_fsdp_recipes.tools.launch import run_recipe

        length = 256 if self.is_small else 4096
        values = {
            "model_name_or_path": directory / "model", "dataset_name": directory / "rows", "output_dir": output,
            "max_steps": NUM_STEPS, "max_length": length, "packing": True, "attn_implementation": "sdpa",
            "packing_strategy": "wrapped", "per_device_train_batch_size": 1, "save_steps": SAVE_STEPS, "bf16": True,
            "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "resume_from_checkpoint": "auto", "seed": 1,
            "gradient_checkpointing": False,
        } | settings  # fmt: skip
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        template = self.out / "template.yaml"
        template.write_text(re.sub(r"num_processes: \d+", f"num_processes: {self.num_processes}", TEMPLATE.read_text()))
        if run_recipe(template, words, self.out / "log.txt", is_done, LIMIT_SECONDS):
            raise RuntimeError(f"the recipe failed; see {self.out / 'log.txt'}")


def measure_load(day: Day) -> Figures:
    """Load a model and shard it: load_model with both sources, and from_pretrained with Accelerate."""
    file = day.out / "load.json"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(TEMPLATE)]
    command += ["--num_processes", str(day.num_processes), "--main_process_port", "0", "--module", "benchmarks.gpu_day"]
    command += ["--load", str(day.model(8e9) / "model"), "--figures", str(file)]
    with (day.out / "log.txt").open("a") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
    return json.loads(file.read_text())


def load_on_ranks(model: str, figures: Path) -> None:
    """Time each way of loading, on this rank; rank 0 writes the figures."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import distributed, load_model
    from tests.ranks.memory import PeakMemory

    accelerator = Accelerator()
    found: dict[str, float] = {}
    for _ in range(LOAD_REPEATS):
        for kind in KINDS:
            torch.accelerator.synchronize()
            with PeakMemory() as memory:
                if kind == "from_pretrained":
                    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
                else:
                    loaded = load_model(model, dtype="bfloat16", source=cast("Any", kind))
                loaded, _ = accelerator.prepare(loaded, torch.optim.SGD(loaded.parameters()))
                torch.accelerator.synchronize()
            found[f"{kind}, seconds"] = min(memory.seconds, found.get(f"{kind}, seconds", memory.seconds))
            found[f"{kind}, host MB"] = memory.growth_bytes / 1e6
            accelerator.free_memory()
            del loaded
    if distributed.is_main():
        figures.write_text(json.dumps(found))


def measure_run(day: Day, name: str, num_parameters: float, settings: dict[str, Any]) -> Figures:
    """Train, save and export; then kill the same run after a save, resume it, and compare the losses."""
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    directory = day.model(num_parameters)
    whole, killed = day.out / name, day.out / f"{name}-killed"
    for output in (whole, killed):
        shutil.rmtree(output, ignore_errors=True)
    started = time.perf_counter()
    day.run(directory, whole, settings)
    seconds = time.perf_counter() - started
    entries = [entry for entry in read_metrics(whole / "metrics.jsonl") if "loss" in entry]
    day.run(directory, killed, settings, (killed / f"checkpoint-{SAVE_STEPS}" / "manifest.json").exists)
    day.run(directory, killed, settings)
    resumed = {e["step"]: e["loss"] for e in read_metrics(killed / "metrics.jsonl") if "loss" in e}
    steady = [entry for entry in entries if not entry.get("is_warmup")]
    figures = {key: steady[-1].get(key) for key in ("tokens_per_second_per_device", "mfu", "step_seconds")}
    figures["peak device GB"] = max(max(entry["device_peak_bytes"]) for entry in entries) / 1e9
    figures["save, seconds of standstill"] = max(entry["seconds"]["save"] for entry in entries)
    figures["whole command, seconds"] = seconds
    figures["resumed losses equal"] = resumed == {entry["step"]: entry["loss"] for entry in entries}
    for output in (whole, killed):
        shutil.rmtree(output)
    return figures


def measure_step(day: Day) -> Figures:
    """Compare a step with one of `trl sft`."""
    size = SMALL_PARAMETERS if day.is_small else 1e9
    options = ["--parameters", str(size), "--template", "full_shard", "--num_processes", str(day.num_processes)]
    command = [sys.executable, "-m", "benchmarks.step", *options, "--rounds", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {"table": done.stdout}


MEASUREMENTS: dict[str, Callable[[Day], Figures]] = {
    "load_8b": measure_load,
    "full_1b": lambda day: measure_run(day, "full_1b", 1e9, FULL),
    "lora_8b": lambda day: measure_run(day, "lora_8b", 8e9, LORA),
    "qlora_8b": lambda day: measure_run(day, "qlora_8b", 8e9, QLORA),
    "lora_8b_recomputed": lambda day: measure_run(day, "lora_8b_recomputed", 8e9, LORA | RECOMPUTED),
    "step": measure_step,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-day"))
    parser.add_argument("--models", type=Path, default=Path("runs/gpu-day-models"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--again", nargs="*", default=[])
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load_on_ranks(options.load, options.figures)
        return 0
    day = Day(options.out.resolve(), options.models.resolve(), options.scale == "small", options.num_processes)
    day.out.mkdir(parents=True, exist_ok=True)
    results = day.out / "results.jsonl"
    deadline = time.monotonic() + 60 * options.minutes
    for name, measure in MEASUREMENTS.items():
        done = read_results(results)
        if (name in done and name not in options.again) or time.monotonic() > deadline:
            continue
        try:
            figures = measure(day)
        except Exception as error:  # the other measurements go on
            figures = {"error": f"{type(error).__name__}: {error}"}
        with results.open("a") as stream:
            stream.write(json.dumps({"name": name, "figures": figures}) + "\n")
        write_report(day.out / "report.md", read_results(results))
    left = [name for name in MEASUREMENTS if name not in read_results(results)]
    print(f"left: {', '.join(left)}; call this again" if left else f"all measured: {day.out / 'report.md'}")
    return 0


def read_results(file: Path) -> dict[str, Figures]:
    lines = file.read_text().splitlines() if file.is_file() else []
    return {row["name"]: row["figures"] for row in map(json.loads, lines)}


def write_report(file: Path, results: dict[str, Figures]) -> None:
    import torch

    device = torch.get_device_module().get_device_name() if torch.accelerator.is_available() else "no accelerator"
    lines = [f"# One accelerator: {device}", "", machine(), ""]
    for name, figures in results.items():
        lines += [f"## {name}", "", *(f"- {key}: {value}" for key, value in figures.items()), ""]
    file.write_text("\n".join(lines))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
