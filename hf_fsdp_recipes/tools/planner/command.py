"""The `hf-fsdp plan` command."""

import contextlib
import io
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hf_fsdp_recipes.errors import PlanError

NOT_JOB_OPTIONS = ("model", "template", "config", "suggest", "as_json")


def plan(
    model: Annotated[Optional[str], typer.Option(help="Hub id, model directory or config.json.")] = None,
    template: Annotated[str, typer.Option(help="Name of a template, or path of an Accelerate config.")] = (
        "fsdp2_full_shard"
    ),
    config: Annotated[Optional[Path], typer.Option(help="Recipe to read the settings from: a name or a file.")] = None,
    gpus: Annotated[Optional[int], typer.Option(help="GPUs on all nodes; default: the template's.")] = None,
    gpus_per_node: Annotated[Optional[int], typer.Option(help="GPUs on each node; default: the template's.")] = None,
    gpu_memory: Annotated[Optional[str], typer.Option(help="Memory of one GPU, such as 24GB; default: 80GB.")] = None,
    host_memory: Annotated[Optional[str], typer.Option(help="Memory of one node, such as 1TB.")] = None,
    interconnect: Annotated[
        Optional[str], typer.Option(help="Bandwidth into one node, such as 100Gb/s; default: 200Gb/s.")
    ] = None,
    intra_node: Annotated[
        Optional[str], typer.Option(help="Bandwidth into one GPU from its node, such as 150GB/s; default: 300GB/s.")
    ] = None,
    gpu_tflops: Annotated[
        Optional[float], typer.Option(help="Peak dense bf16 TFLOP/s of one GPU; default: 312.")
    ] = None,
    batch: Annotated[
        Optional[int],
        typer.Option(help="Rows per rank and micro-batch; default: 1, or 8 with a recipe, as in Trainer."),
    ] = None,
    length: Annotated[Optional[int], typer.Option(help="Tokens per row; default: 1024.")] = None,
    accumulation: Annotated[Optional[int], typer.Option(help="Micro-batches per step; default: 1.")] = None,
    sync_each_batch: Annotated[Optional[bool], typer.Option(help="Reduce gradients after each micro-batch.")] = None,
    lora: Annotated[Optional[int], typer.Option(help="Rank of a LoRA adapter; default: no adapter.")] = None,
    lora_targets: Annotated[
        Optional[str], typer.Option(help="Modules to adapt, comma-separated; default: all-linear.")
    ] = None,
    quantized: Annotated[Optional[str], typer.Option(help="4bit to quantize the base weights.")] = None,
    optimizer: Annotated[Optional[str], typer.Option(help="Trainer's optim; default: adamw_torch_fused.")] = None,
    dtype: Annotated[Optional[str], typer.Option(help="Dtype of the parameters as loaded; default: float32.")] = None,
    mixed_precision: Annotated[Optional[str], typer.Option(help="Compute dtype; default: the template's.")] = None,
    gradient_checkpointing: Annotated[
        Optional[bool], typer.Option(help="Recompute layers in backward; on by default.")
    ] = None,
    attention: Annotated[
        Optional[str],
        typer.Option(help="sdpa, sdpa_padded (with a mask for padded rows), flash or eager; default: sdpa."),
    ] = None,
    fused_loss: Annotated[
        Optional[bool], typer.Option(help="Compute the loss in tiles, as TRL's trainer does; on by default.")
    ] = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Find the fastest template and batch that fit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate the memory and communication of a run from the model's config alone; status 1 if it does not fit.

    The settings of a recipe (--config) replace the defaults below. Options replace recipe settings and defaults.
    """
    options = {name: value for name, value in locals().items() if value is not None and name not in NOT_JOB_OPTIONS}
    text, fits = run(model, template, config, options, suggest, as_json)
    print(text)
    raise typer.Exit(1 if fits is False else 0)


def run(
    model: str | None, template: str, recipe: Path | None, options: dict[str, Any], is_suggesting: bool, as_json: bool
) -> tuple[str, bool | None]:
    """Plan the job, or with `--suggest` the fastest job that fits.

    Returns the text to print, and whether the planned job fits (None if the memory of the GPUs is unknown).
    """
    with _silence_upstream():
        # Imported here, because torch and transformers would slow down every other command.
        from hf_fsdp_recipes.configs.model_configs import describe_source, find_config
        from hf_fsdp_recipes.configs.shipped_files import read_recipe
        from hf_fsdp_recipes.configs.strategy import find_strategy
        from hf_fsdp_recipes.loading.build_on_meta import read_config
        from hf_fsdp_recipes.tools.planner import plan_table, suggestions
        from hf_fsdp_recipes.tools.planner.job_options import make_job, to_options
        from hf_fsdp_recipes.tools.planner.memory_planner import MemoryPlanner

        options = (to_options(read_recipe(recipe, PlanError)) if recipe else {}) | options
        name = model or options.get("model")
        if name is None:
            raise PlanError("There is no model to plan for. Pass --model, or --config with a recipe that names one.")
        overrides = None if model else options.get("config_overrides")  # they apply to the recipe's model only
        job = make_job(find_strategy(template), options)
        planner = MemoryPlanner(read_config(find_config(name), overrides, job.is_4bit))
        suggestion = suggestions.suggest(planner, job) if is_suggesting else None
        if is_suggesting and suggestion is None:
            smaller = ", or LoRA (--lora 16)" if not job.lora_rank else ", or 4-bit base weights (--quantized 4bit)"
            raise PlanError(
                f"Nothing fits, even at batch 1 with offloading or an 8-bit optimizer. Use more GPUs{smaller * (not job.is_4bit)}."
            )
        planned = suggestion.plan if suggestion else planner.plan(job)
        job = planned.job
        changes = [] if is_suggesting else suggestions.find_changes(planner, planned)
        # Strategies of CPU ranks are not compared: the bandwidth between the ranks is unknown.
        strategies = [] if job.strategy.on_cpu else suggestions.compare_strategies(planner, job)
        parts = (planned, strategies, changes)
    if as_json:
        return json.dumps(plan_table.to_json(*parts), indent=2), planned.fits
    headings = [*describe_source(name), *([plan_table.format_suggestion(suggestion)] if suggestion else [])]
    return "".join(f"{heading}\n\n" for heading in headings) + plan_table.format_plan(*parts), planned.fits


@contextlib.contextmanager
def _silence_upstream() -> Iterator[None]:
    """Keep other packages' deprecation notes and import messages out of the output."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
