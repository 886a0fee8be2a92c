"""A training step: the overhead of our recipe over plain `trl sft`, and the throughput of one GPU.

    python -m benchmarks.step [--parameters 3e7] [--steps 24] [--rounds 3]
    python -m benchmarks.step --gpu [--cases lora_8b full_1b] [-- --gradient_checkpointing true]

On two CPU ranks, recipes/sft.py and TRL's own scripts/sft.py alternate in one run, with the same template, YAML and
stopwatch. The stopwatch, `timed.py`, also turns on FSDP, because Accelerate alone trains unsharded copies on CPU ranks. The
figures are ratios of medians, in wall-clock time and in CPU time, which is meaningful on a busy machine too. On one GPU,
the recipe runs alone, with random weights and packed rows of 4,096 tokens; tokens per second and MFU come from
MetricsCallback. Arguments after `--` go to the recipe. Prints a table and rewrites a section of docs/measured.md:
"A step against trl sft", or "One GPU" with --gpu.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.running import llama_config, machine, write_section
from benchmarks.timed import WARMUP_STEPS
from hf_fsdp_recipes.tools.selftest.random_model import write_random_model, write_rows, write_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"recipe": str(ROOT / "recipes" / "sft.py"), "trl sft": "trl.scripts.sft"}
RUN_SECONDS = 540
TARGET = 1.02
PEER = "NeMo Automodel, Llama-3-8B LoRA on one H100, mock data: 12,473 tokens/s, 402 TFLOP/s (published)"
LLAMA3 = {
    "vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "num_key_value_heads": 8, "num_attention_heads": 32,
}  # fmt: skip
LORA = {
    "use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": "all-linear",
    "dtype": "bfloat16", "gradient_checkpointing": False, "learning_rate": 1e-4,
}  # fmt: skip
FULL = {"dtype": "float32", "gradient_checkpointing": True, "learning_rate": 1e-5}


@dataclass(frozen=True)
class Case:
    """One model on one GPU: fields of its config and of its recipe."""

    title: str
    config: dict[str, Any]
    settings: dict[str, Any]
    length: int = 4096
    steps: int = 20
    template: str = "fsdp2_full_shard"


CASES = {
    "lora_8b": Case(
        "Llama-3-8B shape, LoRA rank 8 on every linear layer, bf16",
        LLAMA3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        LORA,
    ),
    "full_1b": Case(
        "Llama-3.2-1B shape, every parameter, bf16 over fp32 masters",
        LLAMA3 | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
        FULL | {"per_device_train_batch_size": 4},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=3e7)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--directory", default=None, help="for the weights (16 GB for 8B); default: a temporary one")
    given = sys.argv[1:]
    own = given[: given.index("--")] if "--" in given else given
    recipe = given[len(own) + 1 :]
    options = parser.parse_args(own)
    if options.steps <= WARMUP_STEPS + 1:
        parser.error(f"--steps {options.steps}: the first {WARMUP_STEPS} are warm-up")
    with tempfile.TemporaryDirectory(prefix="bench-step-", dir=options.directory) as directory:
        if options.gpu:
            measured = [measure_case(CASES[name], Path(directory) / name, recipe) for name in options.cases]
            report_gpu(measured, " ".join(recipe))
        else:
            report_tax(options, measure_tax(options, Path(directory)))


# Overhead over trl sft, on two CPU ranks.


def measure_tax(options: Any, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Run both scripts alternately; return what the slower rank of each run measured."""
    rows, model = directory / "rows", directory / "model"
    write_model(options.parameters, model)
    write_rows(rows, num_rows=4 * options.steps)
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in SCRIPTS}
    for number in range(options.rounds):
        for kind in SCRIPTS if number % 2 == 0 else reversed(SCRIPTS):
            run = directory / f"{kind.split()[0]}-{number}"
            run.mkdir()
            settings = tax_settings(options, model, rows, run / "out")
            (run / "recipe.yaml").write_text(yaml.safe_dump(settings))
            command = [str(run), SCRIPTS[kind], "--config", str(run / "recipe.yaml")]
            launch(ROOT / "accelerate_configs" / "fsdp2_cpu.yaml", 2, [str(ROOT / "benchmarks" / "timed.py"), *command])
            results[kind].append(slower_rank(run))
            print(f"{kind}, round {number}: {statistics.median(results[kind][-1]['wall']):.3f} s a step", flush=True)
    return results


def tax_settings(options: Any, model: Path, rows: Path, output: Path) -> dict[str, Any]:
    """Return the settings of both scripts; every key is TRL's or Trainer's."""
    return {
        "model_name_or_path": str(model), "dataset_name": str(rows), "output_dir": str(output), "max_length": 256,
        "max_steps": options.steps, "per_device_train_batch_size": 2, "learning_rate": 1e-4, "logging_steps": 5,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False,
        "bf16": False, "use_cpu": True, "dataloader_pin_memory": False, "packing": True, "dtype": "float32", "seed": 1,
    }  # fmt: skip


def slower_rank(run: Path) -> dict[str, Any]:
    """Combine the ranks' measurements: the longest time of each step and the highest peak."""
    ranks = [json.loads(file.read_text()) for file in sorted(run.glob("rank-*.json"))]
    joined = {key: [max(spans) for spans in zip(*(r[key] for r in ranks), strict=True)] for key in ("wall", "cpu")}
    return joined | {"peak_bytes": max(rank["peak_bytes"] for rank in ranks), "losses": ranks[0]["losses"]}


def report_tax(options: Any, results: dict[str, list[dict[str, Any]]]) -> None:
    found = {
        kind: {key: statistics.median(s for run in runs for s in run[key]) for key in ("wall", "cpu")}
        | {"peak_bytes": statistics.median(run["peak_bytes"] for run in runs)}
        for kind, runs in results.items()
    }
    ours, plain = found["recipe"], found["trl sft"]
    difference = max(
        abs(a - b) / b for a, b in zip(results["recipe"][0]["losses"], results["trl sft"][0]["losses"], strict=True)
    )
    lines = [
        f"{options.parameters / 1e6:.0f}M parameters, full fine-tune, FSDP2 on 2 gloo ranks, 2 x 256 packed tokens per rank; "
        f"medians of {options.rounds} alternating runs of each. Target: at most {TARGET}.",
        "",
        "| | trl sft | recipes/sft.py | ratio |",
        "|---|---|---|---|",
        *(
            f"| {name} | {plain[key] * scale:,.3f} | {ours[key] * scale:,.3f} | {ours[key] / plain[key]:.3f} |"
            for name, key, scale in (
                ("wall-clock seconds per step", "wall", 1),
                ("CPU seconds per step", "cpu", 1),
                ("peak host memory during training, MB per rank", "peak_bytes", 1e-6),
            )
        ),
        "",
        f"The losses differ by at most {difference:.1e}. `python -m benchmarks.step --parameters {options.parameters:g} "
        f"--steps {options.steps} --rounds {options.rounds}`; {machine()}",
    ]
    print("\n".join(lines))
    write_section("A step against trl sft", lines)


# One GPU.


def measure_case(case: Case, directory: Path, recipe: Sequence[str] = (), on_cpu: bool = False) -> dict[str, Any]:
    """Write a random model, train it with the recipe on one device, return the figures of its metrics.jsonl."""
    write_random_model(case.config, directory / "model")
    return figures(case, *train_case(case, directory / "model", directory, recipe, on_cpu))


def train_case(
    case: Case,
    model: Path,
    directory: Path,
    recipe: Sequence[str] = (),
    on_cpu: bool = False,
    wrapper: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], str]:
    """Train a model with the recipe on one device; return the entries of its metrics.jsonl and the run's output.

    Args:
        case: the recipe's fields.
        model: directory of the model.
        directory: gets recipe.yaml, the rows and the run.
        recipe: arguments that override fields.
        on_cpu: train on a CPU rank.
        wrapper: script and arguments that run the recipe's script, such as `timed.py`.
    """
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    write_rows(directory / "rows", num_rows=64, num_words=case.length)
    settings = {
        "model_name_or_path": str(model), "dataset_name": str(directory / "rows"),
        "output_dir": str(directory / "out"), "max_length": case.length, "max_steps": case.steps, "packing": True,
        "packing_strategy": "wrapped", "per_device_train_batch_size": 1, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "verify_export": "off", "throughput_warmup_steps": 5,
        "optim": "adamw_torch_fused", "lr_scheduler_type": "constant", **case.settings,
    }  # fmt: skip
    (directory / "recipe.yaml").write_text(yaml.safe_dump(settings))
    template = ROOT / "accelerate_configs" / f"{'fsdp2_cpu' if on_cpu else case.template}.yaml"
    command = [*wrapper, SCRIPTS["recipe"], "--config", str(directory / "recipe.yaml"), *recipe]
    output = launch(template, 1, command)
    return read_metrics(directory / "out" / "metrics.jsonl"), output


def figures(case: Case, entries: list[dict[str, Any]], output: str) -> dict[str, Any]:
    """Return the medians of the steps after the warm-up, and what they were measured on."""
    (start,) = [entry for entry in entries if "run" in entry]
    steps = [entry for entry in entries if "loss" in entry and not entry.get("is_warmup")]
    rates = ("tokens_per_second_per_device", "model_flops_per_second_per_device", "mfu", "hfu")
    found = {rate: statistics.median(step[rate] for step in steps) for rate in rates if rate in steps[0]}
    attention = next((line for line in output.splitlines() if line.startswith("attention: ")), "attention: ?")
    return found | {
        "title": case.title,
        "length": case.length,
        "device": start["device"],
        "attention": attention.removeprefix("attention: "),
        "no_mfu": start.get("no_mfu"),
        "device_peak_bytes": max(max(step["device_peak_bytes"]) for step in steps),
        "num_parameters": start["num_parameters"],
    }


def report_gpu(measured: list[dict[str, Any]], recipe: str) -> None:
    lines = gpu_lines(measured, recipe)
    print("\n".join(lines))
    write_section("One GPU", lines)


def gpu_lines(measured: list[dict[str, Any]], recipe: str) -> list[str]:
    """Return the section: one row per case, then the published figure of another library."""
    rows = [
        f"| {one['title']} | {one['length']:,} | {one['attention']} | {one['tokens_per_second_per_device']:,.0f} | "
        f"{one['model_flops_per_second_per_device'] / 1e12:,.1f} | {percent(one, 'mfu')} | {percent(one, 'hfu')} | "
        f"{one['device_peak_bytes'] / 2**30:.1f} |"
        for one in measured
    ]
    return [
        f"One {measured[0]['device']}, random weights, packed rows, medians of the steps after the warm-up.",
        "",
        "| | tokens per row | attention | tokens/s | model TFLOP/s | MFU | HFU | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Published by a peer, not measured here: {PEER}.",
        "",
        f"`python -m benchmarks.step --gpu{' -- ' if recipe else ''}{recipe}`; {machine()}",
    ]


def percent(one: dict[str, Any], rate: str) -> str:
    if rate in one:
        return f"{one[rate]:.1%}"
    return "not recomputed" if rate == "hfu" and "mfu" in one else str(one["no_mfu"])


# Shared.


def launch(template: Path, num_processes: int, command: Sequence[str]) -> str:
    """Start a script through Accelerate on this machine; return what it printed.

    Raises:
        RuntimeError: the script failed. The message has the last lines of its output.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(template)]
    launcher += ["--num_processes", str(num_processes), "--main_process_port", port]
    on_cpu = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} if template.stem == "fsdp2_cpu" else {}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | on_cpu | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*launcher, *command], cwd=ROOT, env=environment, text=True, timeout=RUN_SECONDS, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError("\n".join(done.stdout.splitlines()[-40:]))
    return done.stdout


def write_model(num_parameters: float, directory: Path, vocab_size: int = 2048) -> None:
    """Write a random Llama with about `num_parameters` in its layers; with a small vocabulary, layers dominate."""
    from transformers import AutoModelForCausalLM

    config = llama_config(num_parameters)
    config.vocab_size = vocab_size
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(directory)


if __name__ == "__main__":
    main()
