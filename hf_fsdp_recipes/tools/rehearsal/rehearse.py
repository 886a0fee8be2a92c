"""Runs a recipe end to end on CPU ranks, with a tiny model of the same architecture. Needs no weights and no GPU."""

import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.metrics import progress
from hf_fsdp_recipes.tools.rehearsal.steps import STEPS, Rehearsal


def rehearse(recipe: Path, template: str, overrides: Sequence[str] = (), keep: bool = False) -> bool:
    """Rehearse a recipe; print a line per step and what the real job does differently; return whether every step passed.

    Args:
        recipe: YAML file.
        template: name of a template, or path of an Accelerate config.
        overrides: `--field value` pairs for the recipe.
        keep: keep the rehearsal's directory.
    """
    directory = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    try:
        with progress.bar(len(STEPS), "rehearse", "step", bar_format="{desc} [{elapsed}]") as shown:
            _silence_libraries()  # this turns off their progress bars; ours is created before
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
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
