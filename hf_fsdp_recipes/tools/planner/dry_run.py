"""`recipes/sft.py --dry_run`: the recipe at its full size, checked under its launcher, without weights or training.

Every rank is started as in the real job; rank 0 builds the model on meta and says what would happen.
"""

import os
from typing import Any

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.distributed import is_true
from hf_fsdp_recipes.errors import TemplateError
from hf_fsdp_recipes.patches import cpu_ranks
from hf_fsdp_recipes.tools.planner import recipe_checks


def run(arguments: Any) -> None:
    """Check a recipe and print its batches and memory. Collective: every rank must call this; rank 0 prints.

    Raises:
        LoadError, TemplateError, PlanError: the same on every rank: a config that cannot be read, or all faults of the
            template and of pushing together.
    """
    lines: list[str] = []
    with distributed.sync_errors():
        if distributed.is_main():
            lines = describe(arguments, int(os.environ.get("WORLD_SIZE", "1")))
    for line in lines:
        distributed.print_main(line)


def describe(arguments: Any, num_ranks: int) -> list[str]:
    """Return what would happen, one line each. Main rank only."""
    from hf_fsdp_recipes.loading.build_on_meta import build_on_meta
    from hf_fsdp_recipes.tools.planner import table
    from hf_fsdp_recipes.tools.planner.communication import traffic
    from hf_fsdp_recipes.tools.planner.rank_memory import Planner

    template = template_from_environment()
    config = recipe_checks.read_model_config(arguments)
    model = build_on_meta(config, torch.float32)
    faults = (
        recipe_checks.template_faults(template, model) if is_true(os.environ.get("ACCELERATE_USE_FSDP", "")) else []
    )
    faults += recipe_checks.hub_faults(arguments)
    if faults:
        raise TemplateError(f"{len(faults)} fault{'s'[: len(faults) != 1]}:\n  - " + "\n  - ".join(faults))
    plan = Planner(config).plan(_job(arguments, template, num_ranks))
    need = recipe_checks.estimate_space(arguments)
    return [
        f"dry run: {arguments.model.model_name_or_path or arguments.recipe.config_name}, nothing is loaded or trained",
        f"attention: {arguments.model.attn_implementation or arguments.recipe.attention}",
        *recipe_checks.describe_batches(arguments, num_ranks),
        *([f"disk: {need}"] if need is not None else []),
        *(f"note: {fault}" for fault in recipe_checks.output_faults(arguments)),  # this may not be the job's machine
        "",
        table.format_plan(plan, traffic(plan, config), [], []),
    ]


def _job(arguments: Any, template: dict[str, Any], num_ranks: int) -> Any:
    from hf_fsdp_recipes.tools.planner.request import make_job, options_of
    from hf_fsdp_recipes.tools.planner.strategy import read_strategy

    options = options_of(arguments) | {"gpus": num_ranks}
    options["gpus_per_node"] = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if torch.cuda.is_available():
        options["gpu_memory"] = str(torch.cuda.get_device_properties(0).total_memory)
    return make_job(read_strategy(template, "this launch"), options)


def template_from_environment() -> dict[str, Any]:
    """Return the Accelerate config that the launcher was given, from the variables that it made of it.

    Source: accelerate 1.15 `utils/launch.py`, `prepare_multi_gpu_env`: FSDP_<KEY> for each key of fsdp_config.
    """
    fsdp = {key.lower(): value for key, value in os.environ.items() if key.startswith("FSDP_")}
    if fsdp.get("fsdp_version", "1") == "2":
        fsdp.pop("fsdp_use_orig_params", None)  # the launcher sets it for both versions
        fsdp.pop("fsdp_sharding_strategy", None)
        fsdp.pop("fsdp_backward_prefetch", None)
        fsdp.pop("fsdp_sync_module_states", None)
        fsdp.pop("fsdp_forward_prefetch", None)
    parallel = {
        key.lower(): int(value)
        for key, value in os.environ.items()
        if key.startswith("PARALLELISM_CONFIG_") and value.isdigit() and int(value) > 1
    }
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config: dict[str, Any] = {
        "distributed_type": "FSDP" if validate.is_true(os.environ.get("ACCELERATE_USE_FSDP", "false")) else "NO",
        "mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        # A laptop has no accelerator either; what is written for CPU ranks computes in float32.
        "use_cpu": cpu_ranks.is_requested() and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no",
        "num_processes": num_ranks,
        "num_machines": max(1, num_ranks // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))),
        "fsdp_config": fsdp,
    }
    return config | ({"parallelism_config": parallel} if parallel else {})
