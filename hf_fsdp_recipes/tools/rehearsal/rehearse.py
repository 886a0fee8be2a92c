"""`hf-fsdp rehearse`: the very recipe, template and callbacks, with the model shrunk, for real on CPU ranks.

Loads, trains, is killed, resumes, is told to stop, resumes, exports, reloads and generates, in a directory of its
own that goes away. Ends with a table of what passed and of what the real job does differently. Needs the model's
config and tokenizer and some rows of its data; no weights, no GPU.
"""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from hf_fsdp_recipes.checkpointing.preemption import EXIT_PREEMPTED
from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.configs.templates import find_template, template_directory
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.metrics import progress
from hf_fsdp_recipes.tools.rehearsal import launches, tiny_recipe
from hf_fsdp_recipes.tools.rehearsal.act_progress import ActProgress

RUN = "run"  # where in the rehearsal's directory the run writes
# What the acts take beside each other, measured on two cores with the quickstart's recipe: tells the time left.
TYPICAL_SECONDS = {
    "recipe": 1.0,
    "template": 1.0,
    "output": 0.1,
    "hub": 0.1,
    "shrink": 1.0,
    "data": 1.0,
    "load, train": 14.0,
    "resume": 13.0,
    "finish": 18.0,
    "export": 0.1,
    "generate": 0.5,
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
        shown: the bar of it.
    """

    recipe: Path
    template: Path
    overrides: Sequence[str]
    directory: Path
    shown: ActProgress
    acts: list[Act] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """The rehearsed run's output directory."""
        return self.directory / RUN

    def play(self, name: str, action: Callable[[], str]) -> None:
        """Try one thing, unless an earlier one failed; print its line."""
        act = Act(name)
        self.acts.append(act)
        if all(before.has_passed for before in self.acts[:-1]):
            started = time.monotonic()
            self.shown.begin(name)
            try:
                act.word = action()
                act.has_passed = True
            except RecipeError as error:
                act.word, act.has_passed = str(error), False
            act.word += f" ({time.monotonic() - started:.0f} s)" if act.has_passed else ""
            self.shown.end()
        progress.print_above(_line(act))


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
    shown = ActProgress("rehearse", TYPICAL_SECONDS, directory, lambda: _describe_steps(directory))
    _quieten()  # after the bar is made, which asks whether bars are wanted
    try:
        rehearsal = Rehearsal(recipe, _template_file(template), overrides, directory, shown)
        with shown:
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
    import warnings

    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore", FutureWarning)
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _acts(rehearsal: Rehearsal) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "recipe", lambda: _read(rehearsal)
    yield "template", lambda: _check_template(rehearsal)
    yield "output", lambda: _check_output(rehearsal)
    yield "hub", lambda: _check_hub(rehearsal)
    yield "shrink", lambda: tiny_recipe.prepare(rehearsal, _parsed(rehearsal))
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
    from hf_fsdp_recipes.training.arguments import parse_arguments

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

    from hf_fsdp_recipes.loading.load_model import build_on_meta
    from hf_fsdp_recipes.tools.planner import recipe_checks
    from hf_fsdp_recipes.training.sharded_optimizer import optimizer_errors

    config = validate.read_config(rehearsal.template)
    model = build_on_meta(recipe_checks.read_model_config(_parsed(rehearsal)), torch.float32)
    arguments = _parsed(rehearsal)
    optimizer = str(getattr(arguments.training.optim, "value", arguments.training.optim))
    version = int(config["fsdp_config"].get("fsdp_version", 1))
    faults = [*recipe_checks.template_faults(config, model), *optimizer_errors(optimizer, version)]
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
    from hf_fsdp_recipes.tools.planner import recipe_checks

    arguments = _parsed(rehearsal)
    faults = list(recipe_checks.output_faults(arguments))
    if faults:
        raise RecipeError("; ".join(faults))
    need = recipe_checks.estimate_space(arguments)
    return f"{arguments.training.output_dir} can be written" + (f" and has room for {need}" if need else "")


def _check_hub(rehearsal: Rehearsal) -> str:
    from hf_fsdp_recipes.export.hub import read_target

    settings = yaml.safe_load(rehearsal.recipe.read_text()) | tiny_recipe.as_settings(rehearsal.overrides)
    arguments = _parsed(rehearsal)
    arguments.training.push_to_hub = validate.is_true(settings.get("push_to_hub", False))
    target = read_target(arguments.training)
    if target is None:
        return "nothing is pushed"
    rehearsal.changes.append(f"pushes to {target.repo_id} ({'private' if target.is_private else 'public'})")
    return f"a token is there; {target.repo_id}, {target.strategy}"


def _check_data(rehearsal: Rehearsal) -> str:
    """Prepare the rows as the run will, which names missing columns and templates at once."""
    from hf_fsdp_recipes.training.arguments import is_streaming, parse_arguments
    from hf_fsdp_recipes.training.data import cache
    from hf_fsdp_recipes.training.data.preparation import prepare
    from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows

    arguments = parse_arguments(["--config", str(rehearsal.directory / "recipe.yaml"), "--use_cpu", "true"])
    if is_streaming(arguments) or cache.is_cache(arguments.script.dataset_name):
        return "a stream, or prepared: looked at by the run"
    rows = prepare(arguments, tokenizer_for_rows(load_tokenizer(arguments), arguments.training))
    return "; ".join(counts.describe(arguments.training.max_length) for counts in rows.counts.values())


def _checkpoints(rehearsal: Rehearsal) -> list[Path]:
    return sorted(rehearsal.output.glob("checkpoint-*/manifest.json"))


def _until_first_checkpoint(rehearsal: Rehearsal) -> str:
    process = launches.start(rehearsal.directory)
    try:
        launches.wait_for(process, lambda: bool(_checkpoints(rehearsal)), "a checkpoint", rehearsal.directory)
    finally:
        launches.kill(process)
    return f"{len(_losses(rehearsal))} steps, {_checkpoints(rehearsal)[0].parent.name} complete, then killed"


def _until_stopped(rehearsal: Rehearsal) -> str:
    """Resume, ask the ranks to stop as Slurm does, and see a checkpoint and the documented status."""
    known = {file.parent.name for file in _checkpoints(rehearsal)}
    process = launches.start(rehearsal.directory, "--resume_from_checkpoint", "auto")
    try:
        before = _num_steps_logged(rehearsal)
        launches.wait_for(process, lambda: _num_steps_logged(rehearsal) > before, "a resumed step", rehearsal.directory)
        for rank in psutil.Process(process.pid).children(recursive=True):
            if any(word.endswith("sft.py") for word in rank.cmdline()):
                rank.send_signal(signal.SIGUSR1)
        process.wait(launches.LAUNCH_SECONDS)
    except (psutil.NoSuchProcess, subprocess.TimeoutExpired) as error:
        raise RecipeError(launches.error_line(rehearsal.directory) or f"the stop was not heard: {error}") from error
    finally:
        launches.kill(process)
    log = (rehearsal.directory / launches.LOG_FILE).read_text(errors="replace")
    if f"exitcode  : {EXIT_PREEMPTED}" not in log and process.returncode != 0:
        word = f"the run ended with {process.returncode}, not {EXIT_PREEMPTED}"
        raise RecipeError(launches.error_line(rehearsal.directory) or word)
    new = sorted({file.parent.name for file in _checkpoints(rehearsal)} - known)
    if not new:
        raise RecipeError(f"told to stop, it wrote no checkpoint; the newest is {max(known)}")
    return f"from {max(known)}; told to stop, it wrote {new[-1]}"


def _to_the_end(rehearsal: Rehearsal) -> str:
    process = launches.start(rehearsal.directory, "--resume_from_checkpoint", "auto")
    try:
        process.wait(launches.LAUNCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RecipeError(f"the run did not end within {launches.LAUNCH_SECONDS} s") from error
    finally:
        launches.kill(process)
    if process.returncode != 0:
        raise RecipeError(launches.error_line(rehearsal.directory) or f"the run ended with {process.returncode}")
    losses = _losses(rehearsal)
    return f"step {tiny_recipe.NUM_STEPS}, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def _losses(rehearsal: Rehearsal) -> list[float]:
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    entries = read_metrics(rehearsal.output / "metrics.jsonl")
    return [entry["loss"] for entry in entries if "loss" in entry]


def _describe_steps(directory: Path) -> str:
    from hf_fsdp_recipes.metrics.metrics_file import read_metrics

    steps = [entry["step"] for entry in read_metrics(directory / RUN / "metrics.jsonl") if "loss" in entry]
    return f"step {steps[-1]} of {tiny_recipe.NUM_STEPS}" if steps else ""


def _num_steps_logged(rehearsal: Rehearsal) -> int:
    file = rehearsal.output / "metrics.jsonl"
    return file.read_text(errors="replace").count('"loss"') if file.is_file() else 0


def _check_export(rehearsal: Rehearsal) -> str:
    from hf_fsdp_recipes.export.verify_files import has_weights

    exported = [directory for directory in sorted(rehearsal.output.glob("export*")) if has_weights(directory)]
    log = (rehearsal.directory / launches.LOG_FILE).read_text(errors="replace")
    verified = [line for line in log.splitlines() if line.startswith("verified:")]
    if not exported or not verified:
        raise RecipeError("no export that says what the trained model says")
    return f"{', '.join(directory.name for directory in exported)}; {verified[-1].removeprefix('verified: ')}"


def _generate(rehearsal: Rehearsal) -> str:
    from hf_fsdp_recipes.export.generate import generate

    prompt = rehearsal.directory / "prompt.txt"
    prompt.write_text("What is a rehearsal?")
    words = generate(rehearsal.output / "export", prompt, False, None, 8)
    return f"8 tokens from the reloaded export (random weights, so no sense): {words.strip()[:40]!r}"
