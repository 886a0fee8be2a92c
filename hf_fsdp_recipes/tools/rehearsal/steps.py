"""Runs a recipe end to end on CPU ranks, with a tiny model of the same architecture. Needs no weights and no GPU.

The steps are static checks, three launches of the recipe, and checks of the exported model.
"""

import copy
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from hf_fsdp_recipes.checkpointing.layout import list_checkpoints
from hf_fsdp_recipes.checkpointing.preemption import EXIT_PREEMPTED
from hf_fsdp_recipes.configs import model_configs, validate
from hf_fsdp_recipes.configs.optimizers import optimizer_errors
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.export.generate import generate
from hf_fsdp_recipes.export.hub import read_target
from hf_fsdp_recipes.export.verify_files import has_weights
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta
from hf_fsdp_recipes.metrics import progress
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, read_metrics
from hf_fsdp_recipes.tools.planner import dry_run
from hf_fsdp_recipes.tools.rehearsal import tiny_recipe
from hf_fsdp_recipes.tools.subprocess_runner import SFT_SCRIPT, Run, launch
from hf_fsdp_recipes.training.arguments import Arguments, is_prepared, is_streaming, parse_arguments
from hf_fsdp_recipes.training.data.preparation import prepare
from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows
from hf_fsdp_recipes.units import count

LAUNCH_SECONDS = 240
RESUME = ("--resume_from_checkpoint", "auto")


@dataclass
class Rehearsal:
    """The inputs of a rehearsal and the findings of its steps."""

    recipe: Path
    template: Path
    overrides: Sequence[str]  # `--field value` pairs for the recipe
    directory: Path
    refresh: Callable[[], object]  # redraws the progress bar; called while a step waits
    differences: list[str] = field(default_factory=list)  # what the real job does differently, one line each

    @property
    def output(self) -> Path:
        """The output directory of the rehearsed run."""
        return self.directory / tiny_recipe.RUN_DIRECTORY

    @cached_property
    def arguments(self) -> Arguments:
        """The recipe for the full-size model, parsed as on one CPU rank.

        `push_to_hub` is turned off here. `check_hub` reads the recipe's own value.
        """
        off = ("--push_to_hub", "false", "--use_cpu", "true", "--dry_run", "true")
        return parse_arguments(["--config", str(self.recipe), *self.overrides, *off])

    def launch(self, name: str, *arguments: str) -> AbstractContextManager[Run]:
        """Launch the recipe with the tiny model; the log is `<name>.txt`."""
        arguments = ("--config", str(self.directory / tiny_recipe.RECIPE_FILE), *arguments)
        config, log = self.directory / tiny_recipe.TEMPLATE_FILE, self.directory / f"{name}.txt"
        return launch(config, SFT_SCRIPT, arguments, log, on_cpu=True)

    def wait(self, run: Run, condition: Callable[[], bool] = lambda: False) -> None:
        """Wait until a condition is met or the run exits; raise RecipeError if that takes too long."""

        def is_met() -> bool:
            self.refresh()
            return condition()

        run.wait(LAUNCH_SECONDS, is_met)

    def checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints, oldest first."""
        return [found.path.name for found in list_checkpoints(self.output) if found.is_complete]

    def losses(self) -> list[float]:
        """Return the losses logged so far."""
        return [entry["loss"] for entry in read_metrics(self.output / METRICS_FILE) if "loss" in entry]


def check_recipe(rehearsal: Rehearsal) -> str:
    """Parse the recipe to find unknown fields and invalid combinations."""
    arguments = rehearsal.arguments
    return f"{rehearsal.recipe.name}: {dry_run.model_name(arguments)}"


def check_template(rehearsal: Rehearsal) -> str:
    """Validate the Accelerate config against the model's layer classes and the optimizer."""
    config, training = validate.read_config(rehearsal.template), rehearsal.arguments.training
    model = build_on_meta(dry_run.read_model_config(rehearsal.arguments), torch.float32)
    version = int((config.get("fsdp_config") or {}).get("fsdp_version", 1))
    optimizer = str(getattr(training.optim, "value", training.optim))
    faults = [*dry_run.template_faults(config, model), *optimizer_errors(optimizer, version)]
    if faults:
        raise RecipeError("; ".join(faults))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_ranks, num_nodes = int(config.get("num_processes", 1)), int(config.get("num_machines", 1))
    size = f"{num_parameters / 1e9:,.2f}B parameters on {count(num_ranks, 'rank')}, {count(num_nodes, 'node')}"
    source = model_configs.describe_source(dry_run.model_name(rehearsal.arguments))
    rehearsal.differences += [*source, size, *dry_run.describe_batches(rehearsal.arguments, num_ranks)]
    return f"{rehearsal.template.stem} is valid for {type(model).__name__}"


def check_output(rehearsal: Rehearsal) -> str:
    """Check that the real output directory is writable and has enough space."""
    if faults := list(dry_run.output_faults(rehearsal.arguments)):
        raise RecipeError("; ".join(faults))
    needed = dry_run.estimate_space(rehearsal.arguments)
    return f"{rehearsal.arguments.training.output_dir} is writable" + (f"; the run writes {needed}" if needed else "")


def check_hub(rehearsal: Rehearsal) -> str:
    """If the recipe pushes to the Hub, check that there is a token."""
    settings = tiny_recipe.read_settings(rehearsal.recipe, rehearsal.overrides)
    training = copy.copy(rehearsal.arguments.training)
    training.push_to_hub = is_true(str(settings.get("push_to_hub", False)))
    target = read_target(training)
    if target is None:
        return "push_to_hub is off"
    rehearsal.differences.append(f"pushes to {target.repo_id} ({'private' if target.is_private else 'public'})")
    return f"found a token; pushes to {target.repo_id}, hub_strategy {target.strategy}"


def write_tiny_recipe(rehearsal: Rehearsal) -> str:
    """Write the tiny model, the rows, the template and the recipe for the launches."""
    arguments, directory = rehearsal.arguments, rehearsal.directory
    model, rows = tiny_recipe.write_model(arguments, directory), tiny_recipe.write_rows(arguments, directory)
    tiny_recipe.write_template(rehearsal.template, directory)
    settings = tiny_recipe.read_settings(rehearsal.recipe, rehearsal.overrides)
    rehearsal.differences += tiny_recipe.write_recipe(settings, arguments, directory)
    return f"{model}; {rows}"


def check_data(rehearsal: Rehearsal) -> str:
    """Tokenize the rows as the run will, to detect missing columns or a missing chat template."""
    arguments = parse_arguments(["--config", str(rehearsal.directory / tiny_recipe.RECIPE_FILE), "--use_cpu", "true"])
    if is_streaming(arguments) or is_prepared(arguments.script.dataset_name):
        return "not checked, because the rows are streamed or already tokenized"
    rows = prepare(arguments, tokenizer_for_rows(load_tokenizer(arguments), arguments.training))
    return "; ".join(counts.describe(arguments.training.max_length) for counts in rows.counts.values())


def train_and_kill(rehearsal: Rehearsal) -> str:
    """Train until the first checkpoint is complete, then kill the launcher and the ranks, as if the node had failed."""
    with rehearsal.launch("load") as run:
        rehearsal.wait(run, lambda: bool(rehearsal.checkpoints()))
        if not rehearsal.checkpoints():
            raise RecipeError(run.describe_failure())
    return f"{len(rehearsal.losses())} steps, {rehearsal.checkpoints()[0]} complete, then killed"


def resume_and_stop(rehearsal: Rehearsal) -> str:
    """Resume, send the ranks the signal that Slurm sends before it ends a job; expect a checkpoint and the preemption status."""
    before, num_losses = rehearsal.checkpoints(), len(rehearsal.losses())
    with rehearsal.launch("resume", *RESUME) as run:
        rehearsal.wait(run, lambda: len(rehearsal.losses()) > num_losses)
        run.signal_ranks(signal.SIGUSR1, SFT_SCRIPT)
        rehearsal.wait(run)
        if run.exit_status != 0 and f"exitcode  : {EXIT_PREEMPTED}" not in run.read_log():
            raise RecipeError(run.describe_failure())
    new = [name for name in rehearsal.checkpoints() if name not in before]
    if not new:
        raise RecipeError(f"the run was signaled to stop but wrote no checkpoint; the newest is {before[-1]}")
    return f"from {before[-1]}; signaled to stop, it wrote {new[-1]}"


def resume_and_finish(rehearsal: Rehearsal) -> str:
    """Resume again, train to the end and export."""
    with rehearsal.launch("finish", *RESUME) as run:
        rehearsal.wait(run)
        if run.exit_status != 0:
            raise RecipeError(run.describe_failure())
    losses = rehearsal.losses()
    return f"step {tiny_recipe.NUM_STEPS}, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def check_export(rehearsal: Rehearsal) -> str:
    """Check that the run exported weights and compared their logits with the trained model's."""
    exports = [directory.name for directory in sorted(rehearsal.output.glob("export*")) if has_weights(directory)]
    log = (rehearsal.directory / "finish.txt").read_text(errors="replace").splitlines()
    verified = [line for line in log if line.startswith("verified:")]
    if not exports or not verified:
        raise RecipeError("the run wrote no export that matches the trained model")
    return f"{', '.join(exports)}; {verified[-1].removeprefix('verified: ')}"


def reload_and_generate(rehearsal: Rehearsal) -> str:
    """Load the export with plain transformers and generate from it."""
    prompt = rehearsal.directory / "prompt.txt"
    prompt.write_text("What is a rehearsal?")
    text = generate(rehearsal.output / "export", prompt, False, None, 8)
    return f"8 tokens from the reloaded export (weights are random): {text.strip()[:40]!r}"


STEPS: tuple[tuple[str, Callable[[Rehearsal], str]], ...] = (
    ("recipe", check_recipe),
    ("template", check_template),
    ("output", check_output),
    ("hub", check_hub),
    ("tiny model", write_tiny_recipe),
    ("data", check_data),
    ("load, train", train_and_kill),
    ("resume", resume_and_stop),
    ("finish", resume_and_finish),
    ("export", check_export),
    ("generate", reload_and_generate),
)


def rehearse(recipe: Path, template: str, overrides: Sequence[str] = (), keep: bool = False) -> bool:
    """Rehearse a recipe; print a line per step and what the real job does differently; return whether every step passed."""
    directory = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    try:
        with progress.bar(len(STEPS), "rehearse", "step", bar_format="{desc} [{elapsed}]") as shown:
            _silence_libraries()  # this also turns off progress bars, so the rehearsal's own bar is created first
            rehearsal = Rehearsal(recipe, Path(template), overrides, directory, shown.refresh)
            has_passed = True
            for number, (name, step) in enumerate(STEPS, 1):
                shown.set_description_str(f"step {number}/{len(STEPS)}, {name}")
                has_passed = _run_step(name, step, rehearsal, is_skipped=not has_passed)
        for difference in rehearsal.differences:
            print(f"  real job: {difference}")
        if keep:
            print(f"  kept: {directory}")
        return has_passed
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _run_step(name: str, step: Callable[[Rehearsal], str], rehearsal: Rehearsal, is_skipped: bool) -> bool:
    """Run a step, unless an earlier one failed; print its line and return whether it passed."""
    started, mark, text = time.monotonic(), "-", ""
    if not is_skipped:
        try:
            mark, text = "ok", f"{step(rehearsal)} ({time.monotonic() - started:.0f} s)"
        except RecipeError as error:
            mark, text = "FAILED", str(error)
    progress.print_above(f"{mark:<7}{name:<13}{text}".rstrip())
    return mark == "ok"


def _silence_libraries() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
