"""What it costs to train what one process trains: time and memory of a step, with and without.

    python -m benchmarks.remedies [--steps 12] [--rounds 4] [--vocabulary 64000]

On two CPU ranks, SFTTrainer trains a model from `load_model` with all weights, and with LoRA and a
trained output head, each time once as it is and once without `train_like_one_process`. Without it,
the head's gradients are wrong. The runs alternate in the same processes. Each step is timed on the
slowest rank. Memory is a rank's resident memory, sampled during the steps.
"""

import argparse
import contextlib
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from benchmarks.running import machine, write_section
from benchmarks.step import ROOT, Stopwatch
from hf_fsdp_recipes import distributed, load_model

METHODS = ("all weights", "LoRA and the head")
VARIANTS = ("without", "with")
NAME = "train_like_one_process"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"steps": 12, "rounds": 4, "vocabulary": 64_000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory(prefix="bench-remedies-") as directory:
        write_model(Path(directory), options.vocabulary)
        template = str(ROOT / "accelerate_configs" / "cpu.yaml")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", template]
        command += ["--main_process_port", "0", "--num_processes", "2", "--module"]
        command += ["benchmarks.remedies", *sys.argv[1:], "--directory", directory]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment["ACCELERATE_USE_CPU"] = "true"
        subprocess.run(command, env=environment, cwd=ROOT, check=True)


def write_model(directory: Path, vocabulary: int) -> None:
    """Write a random Llama whose head is a third of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")


def build(options: argparse.Namespace, method: str) -> Any:
    """Return a trainer of rows of random tokens."""
    import random

    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<eos>": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    numbers = random.Random(0)
    rows = [
        {"input_ids": [numbers.randrange(2, options.vocabulary) for _ in range(256)]}
        for _ in range(64)
    ]
    args = SFTConfig(
        str(options.directory / "run"),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1000,
    )
    lora = LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"])
    return SFTTrainer(
        model=load_model(options.directory / "model", dtype="float32"),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora if method == METHODS[1] else None,
        callbacks=[Stopwatch()],
    )


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Sample this process's resident memory. Yields a list that holds the peak at the end."""
    process = psutil.Process()
    peaks = [process.memory_info().rss]
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(0.005):
            peaks[0] = max(peaks[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    yield peaks
    is_done.set()
    thread.join()


def run_rank(options: argparse.Namespace) -> None:
    """Train with all methods and variants alternately; rank 0 reports."""
    from hf_fsdp_recipes.loading import loader

    seconds: dict[tuple[str, str], list[float]] = {}
    megabytes: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds):
        for method in METHODS:
            for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
                changed = mock.patch.object(loader, NAME, lambda model: None)
                with changed if variant == "without" else contextlib.nullcontext():
                    trainer = build(options, method)
                    gc.collect()
                    with peak_memory() as peaks:
                        trainer.train()
                watches = [c for c in trainer.callback_handler.callbacks if type(c) is Stopwatch]
                [stopwatch] = watches
                times = [wall for wall, _ in stopwatch.times()]
                seconds.setdefault((method, variant), []).append(statistics.median(times))
                peak = max(distributed.gather(peaks[0])) / 1e6
                megabytes.setdefault((method, variant), []).append(peak)
                distributed.print_main(
                    f"round {number}, {method}, {variant}: {seconds[method, variant][-1]:.3f} s, "
                    f"{peak:.0f} MB"
                )
                del trainer
    if distributed.is_main():
        report(options, seconds, megabytes)


def report(
    options: argparse.Namespace,
    seconds: dict[tuple[str, str], list[float]],
    megabytes: dict[tuple[str, str], list[float]],
) -> None:
    """Print the table, and rewrite the section of docs/measured.md."""
    lines = [
        "| method | s per step without / with | ratios of single rounds | MB without / with |",
        "|---|---|---|---|",
    ]
    for method in METHODS:
        old = seconds[method, "without"]
        new = seconds[method, "with"]
        ratios = sorted(b / a for a, b in zip(old, new, strict=True))
        memory = [statistics.median(megabytes[method, variant]) for variant in VARIANTS]
        lines.append(
            f"| {method} | {statistics.median(old):.3f} / {statistics.median(new):.3f} | "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f} | {memory[0]:.0f} / {memory[1]:.0f} |"
        )
    lines += ["", f"`python -m benchmarks.remedies {' '.join(sys.argv[1:-2])}`; {machine()}"]
    print("\n".join(lines))
    write_section("Training what one process trains", lines)


if __name__ == "__main__":
    main()
