"""`hf-fsdp rehearse`: the very recipe, template and callbacks, with the model shrunk, for real on CPU ranks.

Loads, trains, is killed, resumes, is told to stop, resumes, exports, reloads and generates, in a directory of its
own that goes away. Ends with a table of what passed and of what the real job does differently. Needs the model's
config and tokenizer and some rows of its data; no weights, no GPU.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.launch import config_check
from hf_fsdp_recipes.launch.cpu_variant import to_cpu_ranks
from hf_fsdp_recipes.launch.templates import find_template, template_directory
from hf_fsdp_recipes.save.preemption import EXIT_PREEMPTED

NUM_ROWS = 96
NUM_STEPS = 9
SAVE_STEPS = 2
MAX_TOKENS = 256  # rows are cut there; long enough for prompts, short enough for CPUs
LAUNCH_SECONDS = 240
# What needs hardware that a rehearsal does not have, and what stands in for it.
STAND_INS = {
    "attention": "auto",
    "attn_implementation": None,
    "optim": "adamw_torch",
    "torch_compile": False,
    "torch_compile_backend": None,
    "use_liger_kernel": False,
    "tf32": None,
    "push_to_hub": False,
    "report_to": "none",
}


@dataclass
class Act:
    """One thing that was tried: passed, or why not; None where an earlier one failed and it was not tried."""

    name: str
    has_passed: bool | None = None
    word: str = ""


@dataclass
class Rehearsal:
    """What a rehearsal knows while it goes on.

    Attributes:
        recipe, template: the user's files.
        overrides: further `--field value` of the recipe.
        directory: where everything is written.
        acts: what was tried, in order.
        changes: what the real job does differently.
    """

    recipe: Path
    template: Path
    overrides: Sequence[str]
    directory: Path
    acts: list[Act] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """The rehearsed run's output directory."""
        return self.directory / "run"

    def play(self, name: str, action: Callable[[], str]) -> None:
        """Try one thing, unless an earlier one failed; print its line."""
        act = Act(name)
        self.acts.append(act)
        if all(before.has_passed for before in self.acts[:-1]):
            started = time.monotonic()
            try:
                act.word = action()
                act.has_passed = True
            except RecipeError as error:
                act.word, act.has_passed = str(error), False
            act.word += f" ({time.monotonic() - started:.0f} s)" if act.has_passed else ""
        print(_line(act), flush=True)


def rehearse(recipe: Path, template: str, overrides: Sequence[str] = (), keep: bool = False) -> bool:
    """Rehearse a recipe and print the table. One process; starts and ends the ranks itself.

    Args:
        recipe: a recipe's YAML.
        template: a shipped template's name, or the path of an Accelerate config.
        overrides: `--field value` pairs, as the recipe itself takes them.
        keep: leave the rehearsal's directory.

    Returns:
        Whether everything passed.
    """
    directory = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    _quieten()
    try:
        rehearsal = Rehearsal(recipe, _template_file(template), overrides, directory)
        for name, action in _acts(rehearsal):
            rehearsal.play(name, action)
        for change in rehearsal.changes:
            print(f"  the real job: {change}")
        if keep:
            print(f"  kept: {directory}")
        return all(act.has_passed for act in rehearsal.acts)
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _quieten() -> None:
    """Keep upstream's bars and notes out of the table."""
    import logging

    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _acts(rehearsal: Rehearsal) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "recipe", lambda: _read(rehearsal)
    yield "template", lambda: _check_template(rehearsal)
    yield "output", lambda: _check_output(rehearsal)
    yield "hub", lambda: _check_hub(rehearsal)
    yield "shrink", lambda: _prepare(rehearsal)
    yield "data", lambda: _check_data(rehearsal)
    yield "load, train", lambda: _until_first_checkpoint(rehearsal)
    yield "resume", lambda: _until_stopped(rehearsal)
    yield "finish", lambda: _to_the_end(rehearsal)
    yield "export", lambda: _check_export(rehearsal)
    yield "generate", lambda: _generate(rehearsal)


def _line(act: Act) -> str:
    mark = {True: "ok", False: "FAILED", None: "-"}[act.has_passed]
    return f"{mark:<7}{act.name:<13}{act.word}"


def _template_file(template: str) -> Path:
    if Path(template).suffix in (".yaml", ".yml") and Path(template).is_file():
        return Path(template)
    return template_directory() / f"{find_template(template).name}.yaml"


def _parsed(rehearsal: Rehearsal) -> Any:
    """Parse the recipe as its own command does, at its full size, as one rank of nothing."""
    from hf_fsdp_recipes.train.arguments import parse_arguments

    # Pushing is looked at by itself, so that everything else is rehearsed without a token too.
    return parse_arguments(
        [
            "--config",
            str(rehearsal.recipe),
            *rehearsal.overrides,
            "--push_to_hub",
            "false",
            "--use_cpu",
            "true",
            "--dry_run",
            "true",
        ]
    )


def _read(rehearsal: Rehearsal) -> str:
    arguments = _parsed(rehearsal)
    return f"{rehearsal.recipe.name}: {arguments.model.model_name_or_path or arguments.recipe.config_name}"


def _check_template(rehearsal: Rehearsal) -> str:
    import torch

    from hf_fsdp_recipes.load.meta_loader import build_on_meta
    from hf_fsdp_recipes.plan import recipe_checks
    from hf_fsdp_recipes.train.speed import optimizer_faults

    config = config_check.read_config(rehearsal.template)
    model = build_on_meta(recipe_checks.read_model_config(_parsed(rehearsal)), torch.float32)
    arguments = _parsed(rehearsal)
    optimizer = str(getattr(arguments.training.optim, "value", arguments.training.optim))
    version = int(config["fsdp_config"].get("fsdp_version", 1))
    faults = [*recipe_checks.template_faults(config, model), *optimizer_faults(optimizer, version)]
    if faults:
        raise RecipeError("; ".join(faults))
    count = sum(parameter.numel() for parameter in model.parameters())
    num_ranks, num_nodes = int(config.get("num_processes", 1)), int(config.get("num_machines", 1))
    rehearsal.changes.append(
        f"{count / 1e9:,.2f}B parameters on {num_ranks} ranks, {num_nodes} node{'s'[: num_nodes != 1]}"
    )
    rehearsal.changes += recipe_checks.describe_batches(arguments, num_ranks)
    return f"{rehearsal.template.stem} fits {type(model).__name__}"


def _check_output(rehearsal: Rehearsal) -> str:
    from hf_fsdp_recipes.plan import recipe_checks

    arguments = _parsed(rehearsal)
    faults = list(recipe_checks.output_faults(arguments))
    if faults:
        raise RecipeError("; ".join(faults))
    need = recipe_checks.estimate_space(arguments)
    return f"{arguments.training.output_dir} can be written" + (f" and has room for {need}" if need else "")


def _check_hub(rehearsal: Rehearsal) -> str:
    from hf_fsdp_recipes.save.hub import read_target

    settings = yaml.safe_load(rehearsal.recipe.read_text()) | _as_settings(rehearsal.overrides)
    arguments = _parsed(rehearsal)
    arguments.training.push_to_hub = config_check.is_true(settings.get("push_to_hub", False))
    target = read_target(arguments.training)
    if target is None:
        return "nothing is pushed"
    rehearsal.changes.append(f"pushes to {target.repo_id} ({'private' if target.is_private else 'public'})")
    return f"a token is there; {target.repo_id}, {target.strategy}"


def _prepare(rehearsal: Rehearsal) -> str:
    """Write the small model, the rows, the recipe and the template of the rehearsal."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes.plan.recipe_checks import read_model_config
    from hf_fsdp_recipes.train.shrink import shrink_config
    from hf_fsdp_recipes.train.tokens import load_tokenizer

    arguments = _parsed(rehearsal)
    config = read_model_config(arguments)
    special, arguments.recipe.special_tokens = arguments.recipe.special_tokens, None
    tokenizer = load_tokenizer(arguments)
    arguments.recipe.special_tokens = special
    small = shrink_config(config, vocab_size=None)
    model = AutoModelForCausalLM.from_config(small, dtype=getattr(config, "dtype", None) or torch.bfloat16)
    model.save_pretrained(rehearsal.directory / "model")
    tokenizer.save_pretrained(rehearsal.directory / "model")
    rows = _write_rows(arguments, rehearsal.directory / "rows")
    template = to_cpu_ranks(config_check.read_config(rehearsal.template))
    if "fsdp_min_num_params" in template["fsdp_config"]:
        template["fsdp_config"]["fsdp_min_num_params"] = 5000
    (rehearsal.directory / "template.yaml").write_text(yaml.safe_dump(template))
    settings = _settings(rehearsal, arguments)
    (rehearsal.directory / "recipe.yaml").write_text(yaml.safe_dump(settings))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{num_parameters / 1e6:.1f}M parameters, {small.get_text_config().num_hidden_layers} layers; {rows}"


def _check_data(rehearsal: Rehearsal) -> str:
    """Prepare the rows as the run will, which names missing columns and templates at once."""
    from hf_fsdp_recipes.train import prepared
    from hf_fsdp_recipes.train.arguments import is_streaming, parse_arguments
    from hf_fsdp_recipes.train.preparation import prepare
    from hf_fsdp_recipes.train.tokens import load_tokenizer, tokenizer_for_rows

    arguments = parse_arguments(["--config", str(rehearsal.directory / "recipe.yaml"), "--use_cpu", "true"])
    if is_streaming(arguments) or prepared.is_prepared(arguments.script.dataset_name):
        return "a stream, or prepared: looked at by the run"
    rows = prepare(arguments, tokenizer_for_rows(load_tokenizer(arguments), arguments.training))
    return "; ".join(tally.describe(arguments.training.max_length) for tally in rows.tallies.values())


def _write_rows(arguments: Any, directory: Path) -> str:
    """Take the first rows of every part of the data, columns and all."""
    from itertools import islice

    from hf_fsdp_recipes.train import prepared
    from hf_fsdp_recipes.train.data import read_splits

    script = arguments.script
    if arguments.mixture.datasets or prepared.is_prepared(script.dataset_name):
        return "its own data, whole"
    is_local = Path(script.dataset_name).exists()
    splits = read_splits(script.dataset_name, script.dataset_config, streaming=not is_local)
    directory.mkdir()
    for split, rows in splits.items():
        if split in (script.dataset_train_split, script.dataset_test_split):
            with (directory / f"{'test' if split == script.dataset_test_split else 'train'}.jsonl").open("w") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in islice(rows, NUM_ROWS))
    return f"the first {NUM_ROWS} rows of {script.dataset_name}"


def _settings(rehearsal: Rehearsal, arguments: Any) -> dict[str, Any]:
    """Return the recipe's settings for the rehearsal; note what differs."""
    settings = yaml.safe_load(rehearsal.recipe.read_text()) | _as_settings(rehearsal.overrides)
    for key, stand_in in STAND_INS.items():
        if key in settings and settings[key] != stand_in:
            rehearsal.changes.append(f"{key}: {settings[key]}")
            settings[key] = stand_in
    settings = {key: value for key, value in settings.items() if value is not None}
    rehearsal.changes.append(
        f"save_strategy: {arguments.training.save_strategy.value}, save_steps: {arguments.training.save_steps}"
    )
    if (rehearsal.directory / "rows").is_dir():
        settings["dataset_name"] = str(rehearsal.directory / "rows")
        for key in ("dataset_config", "dataset_train_split", "dataset_test_split"):
            settings.pop(key, None)
    if "config_name" in settings:
        settings |= {
            "config_name": str(rehearsal.directory / "model"),
            "tokenizer_name": str(rehearsal.directory / "model"),
        }
        settings.pop("config_overrides", None)
    else:
        settings["model_name_or_path"] = str(rehearsal.directory / "model")
    if settings.get("eval_strategy", "no") != "no":
        settings |= {"eval_strategy": "steps", "eval_steps": NUM_STEPS // 2, "eval_delay": 0}
    return settings | {
        "output_dir": str(rehearsal.output),
        "max_length": min(MAX_TOKENS, arguments.training.max_length or MAX_TOKENS),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": min(2, arguments.training.gradient_accumulation_steps),
        "max_steps": NUM_STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        "verify_export": "logits",
        "disable_tqdm": True,
    }


def _as_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Read `--field value` pairs as YAML would."""
    settings: dict[str, Any] = {}
    key = None
    for word in overrides:
        if word.startswith("--"):
            key = word.removeprefix("--")
            settings[key] = True
        elif key is not None:
            settings[key] = yaml.safe_load(word)
    return settings


def _start(rehearsal: Rehearsal, *arguments: str) -> subprocess.Popen[bytes]:
    script = Path(__file__).resolve().parents[2] / "recipes" / "sft.py"
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(rehearsal.directory / "template.yaml"),
    ]
    command += [
        "--main_process_port",
        str(_free_port()),
        str(script),
        "--config",
        str(rehearsal.directory / "recipe.yaml"),
    ]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))
    }
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    log = (rehearsal.directory / "log.txt").open("ab")
    return subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment)


def _free_port() -> int:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _wait_for(process: subprocess.Popen[bytes], is_there: Callable[[], bool], what: str, rehearsal: Rehearsal) -> None:
    """Wait for something that a run does.

    Raises:
        RecipeError: the run ended first, with its own error line, or took too long.
    """
    deadline = time.monotonic() + LAUNCH_SECONDS
    while not is_there():
        if process.poll() is not None:
            raise RecipeError(_error_line(rehearsal) or f"the run ended with {process.returncode} before {what}")
        if time.monotonic() > deadline:
            _kill(process)
            raise RecipeError(f"no {what} within {LAUNCH_SECONDS} s")
        time.sleep(0.05)


def _error_line(rehearsal: Rehearsal) -> str:
    """Return the run's own error: this package's one line, or the last line of a traceback."""
    lines = (rehearsal.directory / "log.txt").read_text(errors="replace").splitlines()
    ours = [
        line for line in lines if line.split(":")[0].endswith("Error") and not line.startswith(("[", " ", "torch."))
    ]
    others = [line.split("]:", 1)[1].strip() for line in lines if line.startswith("[rank") and "Error" in line]
    return (ours or others or [""])[0]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill launcher and ranks, as a failing node would."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)
    process.wait()


def _checkpoints(rehearsal: Rehearsal) -> list[Path]:
    return sorted(rehearsal.output.glob("checkpoint-*/manifest.json"))


def _until_first_checkpoint(rehearsal: Rehearsal) -> str:
    process = _start(rehearsal)
    try:
        _wait_for(process, lambda: bool(_checkpoints(rehearsal)), "a checkpoint", rehearsal)
    finally:
        _kill(process)
    return f"{len(_losses(rehearsal))} steps, {_checkpoints(rehearsal)[0].parent.name} complete, then killed"


def _until_stopped(rehearsal: Rehearsal) -> str:
    """Resume, ask the ranks to stop as Slurm does, and see a checkpoint and the documented status."""
    known = {file.parent.name for file in _checkpoints(rehearsal)}
    process = _start(rehearsal, "--resume_from_checkpoint", "auto")
    try:
        before = _num_steps_logged(rehearsal)
        _wait_for(process, lambda: _num_steps_logged(rehearsal) > before, "a resumed step", rehearsal)
        for rank in psutil.Process(process.pid).children(recursive=True):
            if any(word.endswith("sft.py") for word in rank.cmdline()):
                rank.send_signal(signal.SIGUSR1)
        process.wait(LAUNCH_SECONDS)
    except (psutil.NoSuchProcess, subprocess.TimeoutExpired) as error:
        raise RecipeError(_error_line(rehearsal) or f"the stop was not heard: {error}") from error
    finally:
        _kill(process)
    log = (rehearsal.directory / "log.txt").read_text(errors="replace")
    if f"exitcode  : {EXIT_PREEMPTED}" not in log and process.returncode != 0:
        raise RecipeError(_error_line(rehearsal) or f"the run ended with {process.returncode}, not {EXIT_PREEMPTED}")
    new = sorted({file.parent.name for file in _checkpoints(rehearsal)} - known)
    return f"from {max(known)}; told to stop, it wrote {new[-1] if new else 'nothing new'}"


def _to_the_end(rehearsal: Rehearsal) -> str:
    process = _start(rehearsal, "--resume_from_checkpoint", "auto")
    try:
        process.wait(LAUNCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RecipeError(f"the run did not end within {LAUNCH_SECONDS} s") from error
    finally:
        _kill(process)
    if process.returncode != 0:
        raise RecipeError(_error_line(rehearsal) or f"the run ended with {process.returncode}")
    losses = _losses(rehearsal)
    return f"step {NUM_STEPS}, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def _losses(rehearsal: Rehearsal) -> list[float]:
    from hf_fsdp_recipes.measure.metrics_file import read_metrics

    entries = read_metrics(rehearsal.output / "metrics.jsonl")
    return [entry["loss"] for entry in entries if "loss" in entry]


def _num_steps_logged(rehearsal: Rehearsal) -> int:
    file = rehearsal.output / "metrics.jsonl"
    return file.read_text(errors="replace").count('"loss"') if file.is_file() else 0


def _check_export(rehearsal: Rehearsal) -> str:
    from hf_fsdp_recipes.save.export_check import has_weights

    exported = [directory for directory in sorted(rehearsal.output.glob("export*")) if has_weights(directory)]
    log = (rehearsal.directory / "log.txt").read_text(errors="replace")
    verified = [line for line in log.splitlines() if line.startswith("verified:")]
    if not exported or not verified:
        raise RecipeError("no export that says what the trained model says")
    return f"{', '.join(directory.name for directory in exported)}; {verified[-1].removeprefix('verified: ')}"


def _generate(rehearsal: Rehearsal) -> str:
    from hf_fsdp_recipes.save.generate import generate

    prompt = rehearsal.directory / "prompt.txt"
    prompt.write_text("What is a rehearsal?")
    words = generate(rehearsal.output / "export", prompt, False, None, 8)
    return f"8 tokens from the reloaded export (random weights, so no sense): {words.strip()[:40]!r}"
