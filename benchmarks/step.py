"""A step of recipes/sft.py, with its callbacks and load_model, against a step of TRL's own `trl sft`.

    python -m benchmarks.step [--parameters 3e7] [--steps 24] [--rounds 6] [--template cpu] [--num_processes 2] [--write]

Both scripts train the same model on the same rows with the same arguments, and alternate in one run, in the same processes.
Each step is timed on the slowest rank, from the end of a step to the end of the next, in wall-clock and in CPU time, which
also means something on a busy machine. The noise is the ratio of plain runs to other plain runs.
"""

import argparse
import itertools
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks.running import llama_config, machine, write_section

ROOT = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 4
NUM_WORDS = 2000
SCRIPTS = ("trl sft", "recipes/sft.py")
Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=3e7)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--template", default="cpu")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="rewrite the section of docs/measured.md")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory(prefix="bench-step-") as directory:
        write_model_and_rows(options, Path(directory))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{options.template}.yaml")]
        command += ["--num_processes", str(options.num_processes), "--module", "benchmarks.step", *sys.argv[1:]]
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if options.template == "cpu":
            environment["ACCELERATE_USE_CPU"] = "true"
        subprocess.run([*command, "--directory", directory], env=os.environ | environment, cwd=ROOT, check=True)


def write_model_and_rows(options: argparse.Namespace, directory: Path) -> None:
    """Write a random Llama whose layers dominate, a tokenizer of words, and rows of random words."""
    import json
    import random

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config = llama_config(options.parameters)
    config.vocab_size = NUM_WORDS + 2
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    words = [f"w{number}" for number in range(NUM_WORDS)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    wrapped.save_pretrained(directory / "model")
    rows = [{"text": " ".join(random.choices(words, k=300))} for _ in range(8 * options.steps)]
    (directory / "rows").mkdir()
    (directory / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Stopwatch(TrainerCallback):
    """Records the time at the end of each step after the warm-up, and Trainer's losses."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= WARMUP_STEPS:
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses = [entry["loss"] for entry in state.log_history if "loss" in entry]


def run_rank(options: argparse.Namespace) -> None:
    """Train with both scripts alternately; rank 0 reports."""
    from accelerate import Accelerator
    from transformers import trainer
    from trl.scripts import sft as trl_sft

    from hf_fsdp_recipes import distributed, patches
    from hf_fsdp_recipes.training.arguments import parse_arguments

    patches.enable_cpu_ranks()  # Accelerate ignores FSDP on CPU ranks
    Accelerator.end_training = lambda self: None  # type: ignore[method-assign]  # it would disconnect the ranks
    recipe = runpy.run_path(str(ROOT / "recipes" / "sft.py"))
    found: dict[str, list[Times]] = {script: [] for script in SCRIPTS}
    losses = {}
    for number in range(options.rounds):
        for script in SCRIPTS if number % 2 == 0 else reversed(SCRIPTS):
            stopwatch = Stopwatch()
            trainer.DEFAULT_CALLBACKS.append(stopwatch)  # type: ignore[arg-type]
            arguments = script_arguments(options, options.directory / f"run-{number}-{SCRIPTS.index(script)}")
            if script == "trl sft":
                trl_sft.main(*trl_sft.make_parser().parse_args_and_config(arguments))
            else:
                recipe["main"](parse_arguments([*arguments, "--export", "false"]))
            trainer.DEFAULT_CALLBACKS.remove(stopwatch)  # type: ignore[arg-type]
            ranks = distributed.gather({"wall": stopwatch.wall, "cpu": stopwatch.cpu})
            spans = {clock: [[b - a for a, b in itertools.pairwise(one[clock])] for one in ranks] for clock in ranks[0]}
            found[script].append({clock: [max(step) for step in zip(*spans[clock], strict=True)] for clock in spans})
            losses[script] = stopwatch.losses
    if distributed.is_main():
        report(options, found, losses["trl sft"] == losses["recipes/sft.py"])


def script_arguments(options: argparse.Namespace, output: Path) -> list[str]:
    """Return the arguments of both scripts, all TRL's or Trainer's own."""
    precision = "float32" if options.template == "cpu" else "bfloat16"
    settings = {
        "model_name_or_path": options.directory / "model", "dataset_name": options.directory / "rows", "seed": 1,
        "output_dir": output, "max_steps": options.steps, "max_length": 256, "packing": True, "dtype": "float32",
        "per_device_train_batch_size": 2, "learning_rate": 1e-4, "logging_steps": 5, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False, "bf16": precision == "bfloat16",
        "use_cpu": options.template == "cpu", "dataloader_pin_memory": options.template != "cpu",
    }  # fmt: skip
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def report(options: argparse.Namespace, found: dict[str, list[Times]], are_losses_equal: bool) -> None:
    """Print the table; with --write, rewrite the section of docs/measured.md."""

    def median(script: str, clock: str, rounds: slice = slice(None)) -> float:
        return statistics.median(step for run in found[script][rounds] for step in run[clock])

    lines = [
        f"{options.parameters / 1e6:.0f}M parameters, all trained, template {options.template} on {options.num_processes} "
        f"ranks, 2 x 256 packed tokens per rank; medians of {options.rounds} alternating runs of {options.steps} steps. "
        f"Losses: {'equal' if are_losses_equal else 'different'}.",
        "",
        "| seconds per step | trl sft | recipes/sft.py | ratio | noise |",
        "|---|---|---|---|---|",
    ]
    for name, clock in (("wall-clock time", "wall"), ("CPU time of a rank", "cpu")):
        plain, ours = (median(script, clock) for script in SCRIPTS)
        noise = median("trl sft", clock, slice(0, None, 2)) / median("trl sft", clock, slice(1, None, 2))
        lines.append(f"| {name} | {plain:.4f} | {ours:.4f} | {ours / plain:.3f} | {noise:.3f} |")
    lines += ["", f"`python -m benchmarks.step {' '.join(sys.argv[1:-2])}`; {machine()}"]
    print("\n".join(lines))
    if options.write:
        write_section("A step against trl sft", lines)


if __name__ == "__main__":
    main()
