"""`hf-fsdp plan`: from options to a table or JSON, and whether the run fits."""

import contextlib
import io
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.errors import PlanError

NOT_OPTIONS = ("model", "template", "config", "suggest", "as_json", "command")


def run(
    model: str | None, template: str, recipe: Path | None, options: dict[str, Any], is_suggesting: bool, as_json: bool
) -> tuple[str, bool | None]:
    """Plan what was asked for; return what to print, and whether it fits (None where nothing is known of the GPU).

    Raises:
        PlanError: nothing to plan, or it cannot be planned as described.
    """
    with _quietly():
        from hf_fsdp_recipes.loading import build_on_meta
        from hf_fsdp_recipes.tools.planner import meta_model, suggest, table
        from hf_fsdp_recipes.tools.planner.communication import traffic
        from hf_fsdp_recipes.tools.planner.rank_memory import Planner
        from hf_fsdp_recipes.tools.planner.request import make_job, read_recipe

        options = {**(read_recipe(recipe) if recipe else {}), **_renamed(options)}
        name = model or options.get("model")
        if name is None:
            raise PlanError("no model. Rule: --model takes a config.json, a directory with one or a Hub id.")
        overrides = None if model else options.get("config_overrides")  # they belong to the recipe's own config
        config = build_on_meta.read_config(name, overrides) if overrides else meta_model.read_config(name)
        job = make_job(template, options)
        planner = Planner(config)
        if is_suggesting:
            found = suggest.suggest(planner, job)
            if found is None:
                raise PlanError(
                    "nothing fits at a batch of 1, offloaded or with an 8-bit optimizer. Remedy: more GPUs, LoRA."
                )
            plan = found.plan
        else:
            plan = planner.plan(job)
        changes = suggest.smallest_changes(planner, plan) if plan.fits is False else []
        # Nothing is known of what connects CPU ranks.
        shardings = [] if plan.job.on_cpu else suggest.compare_shardings(planner, plan.job)
        parts = (plan, traffic(plan, planner.config), shardings, changes)
    if as_json:
        return json.dumps(table.plain(*parts), indent=2), plan.fits
    text = table.format_plan(*parts)
    return (f"{table.format_suggestion(found)}\n\n{text}" if is_suggesting and found else text), plan.fits


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    names = {"gradient_checkpointing": "checkpointing"}
    return {names.get(name, name): value for name, value in options.items()}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep upstream's deprecation notes and import messages off the table."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
