"""A step of recipes/sft.py against a step of TRL's own `trl sft`.

The recipe's step includes its callbacks and load_model.

    python -m benchmarks.step [--parameters 3e7] [--steps 24] [--rounds 6] [--template cpu]
    [--num_processes 2] [--optim sgd]

Both scripts train the same model on the same rows with the same arguments, and alternate in one
run, in the same processes. Each step is timed on the slowest rank, from the end of a step to the
end of the next, in wall-clock and in CPU time, which also means something on a busy machine. A
ratio is the median of the rounds' ratios of medians.
"""

import argparse
import itertools
import json
import os
import random
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
from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.training.arguments import parse_arguments
from hf_fsdp_recipes.upstream import patches

ROOT = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 4
NUM_WORDS = 2000
SCRIPTS = ("trl sft", "recipes/sft.py")
Seconds = tuple[float, float]  # of the wall clock, and of a rank's CPU time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {
        "parameters": 3e7,
        "steps": 24,
        "rounds": 6,
        "template": "cpu",
        "num_processes": 2,
        "rows": 2,
    }
    for name, default in (defaults | {"optim": "adamw_torch_fused"}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory(prefix="bench-step-") as directory:
        write_model_and_rows(options, Path(directory))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{options.template}.yaml")]
        command += [
            "--num_processes",
            str(options.num_processes),
            "--module",
            "benchmarks.step",
            *sys.argv[1:],
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if options.template == "cpu":
            environment["ACCELERATE_USE_CPU"] = "true"
        subprocess.run([*command, "--directory", directory], env=environment, cwd=ROOT, check=True)


def write_model_and_rows(options: argparse.Namespace, directory: Path) -> None:
    """Write a random Llama, a tokenizer of words, and rows of random words.

    The model's layers dominate.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config = llama_config(options.parameters)
    config.vocab_size = NUM_WORDS + 2
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    words = [f"w{number}" for number in range(NUM_WORDS)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *words])}
    words_only = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(directory / "model")
    rows = [{"text": " ".join(random.choices(words, k=300))} for _ in range(8 * options.steps)]
    (directory / "rows").mkdir()
    (directory / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Stopwatch(TrainerCallback):
    """Records the time at the end of each step after the warm-up, and the losses."""

    def __init__(self) -> None:
        self.marks: list[Seconds] = []
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= WARMUP_STEPS:
            self.marks.append((time.perf_counter(), time.process_time()))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses = [entry["loss"] for entry in state.log_history if "loss" in entry]

    def times(self) -> list[Seconds]:
        """Return the seconds of each step on the slowest rank. Collective."""
        own = [
            (after[0] - before[0], after[1] - before[1])
            for before, after in itertools.pairwise(self.marks)
        ]
        steps = zip(*distributed.gather(own), strict=True)
        return [(max(wall for wall, _ in ranks), max(cpu for _, cpu in ranks)) for ranks in steps]


def run_rank(options: argparse.Namespace) -> None:
    """Train with both scripts alternately; rank 0 reports."""
    from accelerate import Accelerator
    from transformers import trainer
    from trl.scripts import sft as trl_sft

    patches.enable_cpu_ranks()  # Accelerate ignores FSDP on CPU ranks
    Accelerator.end_training = lambda self: None  # it would disconnect the ranks
    recipe = runpy.run_path(str(ROOT / "recipes" / "sft.py"))
    found: dict[str, list[list[Seconds]]] = {script: [] for script in SCRIPTS}
    losses = {}
    for number in range(options.rounds):
        for script in SCRIPTS if number % 2 == 0 else reversed(SCRIPTS):
            stopwatch = Stopwatch()
            # Upstream's list holds classes, and Trainer takes instances too.
            callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
            callbacks.append(stopwatch)
            arguments = script_arguments(
                options, options.directory / f"run-{number}-{SCRIPTS.index(script)}"
            )
            if script == "trl sft":
                trl_sft.main(*trl_sft.make_parser().parse_args_and_config(arguments))
            else:
                recipe["main"](parse_arguments([*arguments, "--export", "false"]))
            callbacks.remove(stopwatch)
            found[script].append(stopwatch.times())
            wall, cpu = (
                statistics.median(step[clock] for step in found[script][-1]) for clock in (0, 1)
            )
            distributed.print_main(
                f"round {number}, {script}: {wall:.3f} s a step, {cpu:.3f} s of CPU time"
            )
            losses[script] = stopwatch.losses
    if distributed.is_main():
        report(options, found, losses["trl sft"] == losses["recipes/sft.py"])


def script_arguments(options: argparse.Namespace, output: Path) -> list[str]:
    """Return the arguments of both scripts, all TRL's or Trainer's own."""
    on_cpu = options.template == "cpu"
    settings = {
        "model_name_or_path": options.directory / "model",
        "dataset_name": options.directory / "rows",
        "seed": 1,
        "output_dir": output,
        "max_steps": options.steps,
        "max_length": 256,
        "packing": True,
        "dtype": "float32",
        "per_device_train_batch_size": options.rows,
        "optim": options.optim,
        "learning_rate": 1e-4,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": not on_cpu,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def report(
    options: argparse.Namespace, found: dict[str, list[list[Seconds]]], are_losses_equal: bool
) -> None:
    """Print the table, and rewrite the section of docs/measured.md."""
    lines = [
        f"{options.parameters / 1e6:.0f}M parameters, all trained, template {options.template} on "
        f"{options.num_processes} ranks, {options.rows} x 256 packed tokens per rank, "
        f"{options.optim}; {options.rounds} alternating runs of {options.steps} steps. "
        f"Losses: {'equal' if are_losses_equal else 'different'}.",
        "",
        "| seconds per step, median | trl sft | recipes/sft.py | ratio | ratios of single rounds |",
        "|---|---|---|---|---|",
    ]
    for clock, name in enumerate(("wall-clock time", "CPU time of a rank")):
        medians = [
            [statistics.median(step[clock] for step in run) for run in found[script]]
            for script in SCRIPTS
        ]
        plain, ours = map(statistics.median, medians)
        ratios = sorted(b / a for a, b in zip(*medians, strict=True))
        ratio = f"{statistics.median(ratios):.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f}"
        lines.append(f"| {name} | {plain:.4f} | {ours:.4f} | {ratio} |")
    lines += ["", f"`python -m benchmarks.step {' '.join(sys.argv[1:-2])}`; {machine()}"]
    print("\n".join(lines))
    write_section("A step against trl sft", lines)


if __name__ == "__main__":
    main()
