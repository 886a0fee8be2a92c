"""Measures on one accelerator what CPU ranks cannot show, on machines that are available for only a few minutes.

    make gpu-day [OUT=runs/gpu-day] [MODELS=runs/gpu-day-models] [MINUTES=9] [AGAIN=copies]

Each measurement has its own process and a line in OUT/results.jsonl, so that a crash loses only one measurement. A call ends
before MINUTES are over and prints which measurements are left; the next call runs those. OUT/report.md has all figures.
OUT/logs has the output of each measurement. OUT/traces has a Perfetto trace of one step of each training run. All models have
random weights; they take 25 GB in the directory MODELS, which can be deleted afterwards. `--scale small` measures tiny models,
to test this script.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.load import forget
from benchmarks.step import FULL, LLAMA3, LORA, ROOT, Case, figures, train_case
from benchmarks.traced import WARMUP_STEPS
from hf_fsdp_recipes.tools.planner import command as planner
from hf_fsdp_recipes.tools.selftest import measurements as selftest
from hf_fsdp_recipes.tools.selftest.measurements import Figures, Result, Site, find_model, measure, run_on_ranks
from hf_fsdp_recipes.tools.subprocess_runner import start

RANKS_SCRIPT = ROOT / "benchmarks" / "gpu_day_ranks.py"
SMALL_SECONDS = 60  # expected time of each measurement with `--scale small`
MARGIN_SECONDS = 15  # reserved at the end of a call for the report
LLAMA_8B = LLAMA3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_1B = LLAMA3 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
LLAMA_1_7B = LLAMA_1B | {"num_hidden_layers": 23}  # 1.66 billion parameters: 20 GB with AdamW in float32
SETTINGS = {
    "lora_8b": LORA,
    "qlora_8b": LORA | {"load_in_4bit": True, "use_bnb_nested_quant": True},
    "full_1b": FULL | {"gradient_checkpointing": False, "per_device_train_batch_size": 2},
}
CHECKPOINTING = {"gradient_checkpointing": True}
# Like recipes/qwen3_8b_lora_80gb.yaml, but with 4 micro-batches. NeMo Automodel uses 16, which would take too long here.
FASTEST = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "compile_blocks": True,
    "dataloader_num_workers": 2,
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "lora_8b": {
        "": {},
        "checkpointing": CHECKPOINTING,
        "micro_batch_2": {"per_device_train_batch_size": 2},
        "sdpa": {"attention": "sdpa"},
        "flash": {"attention": "flash"},
        "flex": {"attention": "flex"},
        "compile_blocks": {"compile_blocks": True},
        "liger": {"use_liger_kernel": True},
        "no_reshard": {"template": "fsdp2_shard_grad_op"},
        "fastest": FASTEST,
    },
    "qlora_8b": {"checkpointing": CHECKPOINTING},
    "full_1b": {
        "": {},
        "checkpointing": CHECKPOINTING,
        "offload": {"template": "fsdp2_full_shard_offload"},
        "activation_offloading": {"activation_offloading": True},
        "compile_blocks": {"compile_blocks": True},
        "liger": {"use_liger_kernel": True},
        "paged_adamw_32bit": {"optim": "paged_adamw_32bit"},
        "paged_adamw_8bit": {"optim": "paged_adamw_8bit"},
    },
}


@dataclass(frozen=True)
class Day:
    """What a measurement needs: directories for results and models, the size of the models, and the time limit."""

    out: Path
    models: Path
    is_small: bool
    deadline: float

    def site(self, config: dict[str, Any] = selftest.TINY) -> Site:
        """Return a site with one rank and a model of this config, or a tiny model if `is_small`."""
        found = selftest.find_site(self.models, selftest.SFT_SCRIPT, self.deadline)
        if self.is_small:
            sizes: dict[str, Any] = {
                "config": selftest.TINY,
                "copied_bytes": 16_000_000,
                "num_tokens": 64,
                "num_batches": 1,
            }
        else:
            sizes = {"config": config, "copied_bytes": 4 * 10**9, "num_tokens": 4096, "num_batches": 4}
        return dataclasses.replace(found, num_ranks=1, **sizes)


def measure_load(day: Day) -> Figures:
    """Load 16 GB with each source and with transformers, from the page cache and from disk."""
    site = day.site(LLAMA_8B)
    checkpoint, tiny = find_model(site, site.config), find_model(site, selftest.TINY)
    inputs: dict[str, Any] = {"precision": "no", "checkpoint": checkpoint, "tiny": tiny}
    found = run_on_ranks(site, "load", **inputs) | run_on_ranks(site, "stock load", script=RANKS_SCRIPT, **inputs)
    for source in ("rank0", "direct", "from_pretrained"):
        forget(checkpoint)
        options = {"script": RANKS_SCRIPT} if source == "from_pretrained" else {"sources": [source]}
        cold = run_on_ranks(site, "load" if "sources" in options else "stock load", **inputs, **options)
        found |= {f"from disk: {name}": value for name, value in cold.items() if name.startswith(source)}
    return found


def compare_4bit(day: Day) -> Figures:
    """Compare 4-bit weights with those that bitsandbytes makes on the device."""
    site = day.site(LLAMA_1B)
    checkpoint, tiny = find_model(site, site.config), find_model(site, selftest.TINY)
    return run_on_ranks(site, "4-bit", script=RANKS_SCRIPT, precision="no", checkpoint=checkpoint, tiny=tiny)


def train(day: Day, model: str, variant: str) -> Figures:
    """Train 20 steps with the recipe; compare time and memory with the plan, and the report's times with wall-clock time."""
    site = day.site(LLAMA_1B if model == "full_1b" else LLAMA_8B)
    length, steps = (128, 8) if day.is_small else (4096, 20)
    settings = SETTINGS[model] | VARIANTS[model][variant]
    template = str(settings.pop("template", "fsdp2_full_shard"))
    case = Case(f"{model}-{variant}".strip("-"), dict(site.config), settings, length, steps, template)
    with tempfile.TemporaryDirectory(dir=day.models) as name:
        directory = Path(name)
        wrapper = [str(ROOT / "benchmarks" / "traced.py"), name]
        on_cpu = site.device is None
        options = ["--export", "false"]
        entries, output = train_case(case, find_model(site, site.config), directory, options, on_cpu, wrapper)
        wall_seconds = json.loads((directory / "wall.json").read_text())["seconds"]
        trace = directory / "trace.json.gz"
        if trace.exists():
            (day.out / "traces").mkdir(exist_ok=True)
            trace.replace(day.out / "traces" / f"{case.title}.json.gz")
        planned = plan(directory / "recipe.yaml", template)
    measured = figures(case, entries, output)
    training = [entry for entry in entries if "loss" in entry and not entry.get("is_warmup")]
    timed = [entry for entry in training if WARMUP_STEPS < entry["step"] < steps]
    clock_seconds = sum(sum(entry["seconds"].values()) for entry in timed)
    rates = {"mfu": measured["mfu"]} if "mfu" in measured else {}
    return rates | {
        "attention": measured["attention"],
        "tokens/s": measured["tokens_per_second_per_device"],
        "step, seconds": statistics.median(entry["step_seconds"] for entry in training),
        "planned step, seconds": planned["communication"]["compute_seconds"],
        "peak allocated, GiB": measured["device_peak_bytes"] / 2**30,
        "peak reserved, GiB": max(max(entry["device_reserved_peak_bytes"]) for entry in training) / 2**30,
        "planned peak, GiB": planned["peak_bytes"] / 2**30,
        "planned with allowance, GiB": planned["needed_bytes"] / 2**30,
        "the report's clock, seconds": clock_seconds,
        "wall, seconds": wall_seconds,
    }


def plan(recipe: Path, template: str) -> dict[str, Any]:
    """Return the plan of a recipe on one device."""
    text, _ = planner.run(None, template, recipe, {"gpus": 1, "gpus_per_node": 1}, False, True)
    return json.loads(text)


MEASUREMENTS: dict[str, tuple[int, Callable[[Day], Figures]]] = {  # the number is the expected time in seconds
    "copies": (30, lambda day: selftest.measure_copies(day.site())),
    "train_kill_resume": (120, lambda day: selftest.train_kill_resume(day.site())),
    "save_20gb": (180, lambda day: selftest.measure_save(day.site(LLAMA_1_7B))),
    "load_16gb": (300, measure_load),
    "4bit": (90, compare_4bit),
    **{
        f"{model}-{variant}".strip("-"): (
            120 if settings.get("compile_blocks") else 80,
            functools.partial(train, model=model, variant=variant),
        )
        for model, variants in VARIANTS.items()
        for variant, settings in variants.items()
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-day"))
    parser.add_argument("--models", type=Path, default=Path("runs/gpu-day-models"))
    parser.add_argument("--minutes", type=float, default=9.0, help="end before this")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--again", nargs="+", choices=MEASUREMENTS, default=[], help="measure these again")
    parser.add_argument("--run", choices=MEASUREMENTS, help=argparse.SUPPRESS)  # runs one measurement, in this process
    options = parser.parse_args()
    options.out, options.models = options.out.resolve(), options.models.resolve()
    for directory in (options.out / "logs", options.models):
        directory.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes - MARGIN_SECONDS
    if options.run:
        day = Day(options.out, options.models, options.scale == "small", deadline + MARGIN_SECONDS)
        result = measure(options.run, lambda _: MEASUREMENTS[options.run][1](day), day.site())
        result_file(options.out, options.run).write_text(json.dumps(dataclasses.asdict(result)))
        return
    if options.scale == "full" and not torch.accelerator.is_available():
        parser.error("there is no accelerator. On CPU ranks, use --scale small, which tests the program.")
    left = run_all(options, deadline)
    print(f"left: {', '.join(left) or 'nothing'}; report: {options.out / 'report.md'}")


def run_all(options: argparse.Namespace, deadline: float) -> list[str]:
    """Run the measurements that are not in results.jsonl and should end in time; return the names of the rest."""
    results = read_results(options.out)
    left = []
    for name in options.only:
        expected_seconds = SMALL_SECONDS if options.scale == "small" else MEASUREMENTS[name][0]
        if name in results and name not in options.again:
            continue
        if time.monotonic() + expected_seconds > deadline:
            left.append(name)
            continue
        results[name] = run_in_process(options, name, deadline)
        with (options.out / "results.jsonl").open("a") as stream:
            stream.write(json.dumps(dataclasses.asdict(results[name])) + "\n")
        reason = results[name].error.partition("\n")[0]
        print(f"{results[name].status:<8}{results[name].seconds:4.0f} s  {name}  {reason}", flush=True)
        report(options.out, results)
    report(options.out, results)
    return left


def run_in_process(options: argparse.Namespace, name: str, deadline: float) -> Result:
    """Run one measurement in its own process, which is killed at the deadline."""
    started = time.monotonic()
    limit_seconds = deadline - started
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--run", name, "--minutes", str(limit_seconds / 60)]
    command += ["--out", str(options.out), "--models", str(options.models), "--scale", options.scale]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    file = result_file(options.out, name)
    file.unlink(missing_ok=True)
    log = options.out / "logs" / f"{name}.txt"
    with start(command, os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}, log) as run:
        try:
            for _ in run.poll(limit_seconds, interval_seconds=0.2):
                pass
        except TimeoutError as error:
            return Result(name, "failed", time.monotonic() - started, error=f"Killed: {error}.")
    if not file.exists():
        return Result(name, "failed", time.monotonic() - started, error=run.describe_failure())
    return Result(**json.loads(file.read_text()))


def read_results(out: Path) -> dict[str, Result]:
    """Return the last result of each measurement; a line that was cut off is skipped."""
    results = {}
    file = out / "results.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            result = Result(**json.loads(line))
        except ValueError:
            continue
        results[result.name] = result
    return results


def report(out: Path, results: dict[str, Result]) -> None:
    """Write OUT/report.md."""
    site = selftest.find_site(out, selftest.SFT_SCRIPT, 0.0)
    ordered = [results[name] for name in MEASUREMENTS if name in results]
    selftest.write_report(out / "report.md", "One accelerator", site.device, 1, ordered)


def result_file(out: Path, name: str) -> Path:
    """Return where the process of a measurement writes its result."""
    return out / "logs" / f"{name}.json"


if __name__ == "__main__":
    main()
