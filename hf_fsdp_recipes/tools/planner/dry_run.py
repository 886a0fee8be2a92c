"""`recipes/sft.py --dry_run`: validates a recipe and its template at full size and plans the run, without weights."""

import os
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.configs.strategy import read_strategy
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import TemplateError
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta
from hf_fsdp_recipes.patches import cpu_ranks
from hf_fsdp_recipes.tools.planner import plan_table, recipe_checks
from hf_fsdp_recipes.tools.planner.communication import estimate_traffic
from hf_fsdp_recipes.tools.planner.job_options import flatten_arguments, make_job, to_options
from hf_fsdp_recipes.tools.planner.memory_planner import MemoryPlanner
from hf_fsdp_recipes.tools.planner.training_job import TrainingJob

if TYPE_CHECKING:
    from hf_fsdp_recipes.training.arguments import Arguments


def run(arguments: "Arguments") -> None:
    """Validate a recipe and print its batches, disk space and memory on rank 0.

    Collective: every rank must call this.

    Raises:
        LoadError, TemplateError, PlanError: the model's config or the template cannot work; the same on every rank.
    """
    for line in distributed.run_on_main(lambda: describe(arguments, int(os.environ.get("WORLD_SIZE", "1")))):
        distributed.print_main(line)


def describe(arguments: "Arguments", num_ranks: int) -> list[str]:
    """Return the lines to print. Rank 0 only."""
    template = template_from_environment()
    config = recipe_checks.read_model_config(arguments)
    if template["distributed_type"] == "FSDP":
        faults = recipe_checks.template_faults(template, build_on_meta(config, torch.float32))
        if faults:
            raise TemplateError(f"the template has {len(faults)} errors:\n  - " + "\n  - ".join(faults))
    plan = MemoryPlanner(config).plan(_make_job(arguments, template, num_ranks))
    space = recipe_checks.estimate_space(arguments)
    return [
        f"dry run of {arguments.model.model_name_or_path or arguments.recipe.config_name}: nothing is loaded or trained",
        f"attention: {arguments.model.attn_implementation or arguments.recipe.attention}",
        *recipe_checks.describe_batches(arguments, num_ranks),
        *([f"disk: {space}"] if space is not None else []),
        # Only notes, because the job may run on another machine.
        *(f"note: {fault}" for fault in recipe_checks.output_faults(arguments)),
        "",
        plan_table.format_plan(plan, estimate_traffic(plan), [], []),
    ]


def _make_job(arguments: "Arguments", template: dict[str, Any], num_ranks: int) -> TrainingJob:
    strategy = read_strategy(template, "this launch")
    options = to_options(flatten_arguments(arguments))
    options |= {"gpus": num_ranks, "gpus_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))}
    if torch.accelerator.is_available() and not strategy.on_cpu:
        _, total_bytes = torch.accelerator.get_memory_info()
        options["gpu_memory"] = str(total_bytes)
    return make_job(strategy, options)


def template_from_environment() -> dict[str, Any]:
    """Rebuild the Accelerate config from the environment variables that `accelerate launch` sets from it.

    Source: accelerate 1.15 `utils/launch.py`, `prepare_multi_gpu_env`: FSDP_<KEY> for each key of fsdp_config.
    """
    fsdp = {key.lower(): value for key, value in os.environ.items() if key.startswith("FSDP_")}
    if fsdp.get("fsdp_version", "1") == "2":
        # The launcher sets FSDP1's keys for both versions.
        fsdp = {key: value for key, value in fsdp.items() if key not in validate.FSDP1_ONLY}
    parallelism = {
        key.lower(): int(value)
        for key, value in os.environ.items()
        if key.startswith("PARALLELISM_CONFIG_") and value.isdigit() and int(value) > 1
    }
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    config: dict[str, Any] = {
        "distributed_type": "FSDP" if is_true(os.environ.get("ACCELERATE_USE_FSDP", "false")) else "NO",
        "mixed_precision": precision,
        # On a machine without GPUs, a mixed-precision template is planned for the GPUs that it is meant for.
        "use_cpu": cpu_ranks.is_requested() and precision == "no",
        "num_processes": num_ranks,
        "num_machines": max(1, num_ranks // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))),
        "fsdp_config": fsdp,
    }
    return config | ({"parallelism_config": parallelism} if parallelism else {})
