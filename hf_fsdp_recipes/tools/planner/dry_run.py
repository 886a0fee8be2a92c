"""Validates a recipe and its template for the full-size model and plans the run, without loading weights.

`recipes/sft.py --dry_run` runs this. A rehearsal (`hf-fsdp rehearse`) runs the same checks.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.configs import model_configs, validate
from hf_fsdp_recipes.configs.strategy import read_strategy
from hf_fsdp_recipes.environment import is_fsdp_requested, mixed_precision, parallel_sizes
from hf_fsdp_recipes.errors import RecipeError, TemplateError
from hf_fsdp_recipes.export.hub import read_target
from hf_fsdp_recipes.loading.build_on_meta import build_on_meta, read_config
from hf_fsdp_recipes.model_class import choose_class
from hf_fsdp_recipes.patches import cpu_ranks
from hf_fsdp_recipes.tools.planner import plan_table, suggestions
from hf_fsdp_recipes.tools.planner.job_options import flatten_arguments, make_job, to_options
from hf_fsdp_recipes.tools.planner.memory_planner import MemoryPlanner
from hf_fsdp_recipes.tools.planner.training_job import TrainingJob
from hf_fsdp_recipes.units import count, format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_fsdp_recipes.training.arguments import Arguments


def run(arguments: "Arguments") -> None:
    """Validate a recipe and print its batches, disk space and memory on rank 0; all ranks raise the same error. Collective."""
    for line in distributed.run_on_main(lambda: describe(arguments, int(os.environ.get("WORLD_SIZE", "1")))):
        distributed.print_main(line)


def describe(arguments: "Arguments", num_ranks: int) -> list[str]:
    """Validate the recipe and return the lines that a dry run prints. Only rank 0 calls this."""
    template = template_from_environment()
    config = read_model_config(arguments)
    if template["distributed_type"] == "FSDP":
        faults = template_faults(template, build_on_meta(config, torch.float32))
        if faults:
            raise TemplateError(f"the template has {count(len(faults), 'error')}:\n  - " + "\n  - ".join(faults))
    planner = MemoryPlanner(config)
    plan = planner.plan(_make_job(arguments, template, num_ranks))
    space = estimate_space(arguments)
    name = model_name(arguments)
    return [
        f"dry run of {name}: nothing is loaded or trained",
        *model_configs.describe_source(name),
        f"attention: {arguments.model.attn_implementation or arguments.recipe.attention}",
        *describe_batches(arguments, num_ranks),
        *([f"disk: {space}"] if space is not None else []),
        # Only notes, not errors, because the job may run on another machine.
        *(f"note: {fault}" for fault in (*output_faults(arguments), *hub_faults(arguments))),
        "",
        plan_table.format_plan(plan, [], suggestions.find_changes(planner, plan)),
    ]


def _make_job(arguments: "Arguments", template: validate.Section, num_ranks: int) -> TrainingJob:
    strategy = read_strategy(template, "this launch")
    options = to_options(flatten_arguments(arguments))
    options |= {"gpus": num_ranks, "gpus_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))}
    if torch.accelerator.is_available() and not strategy.on_cpu:
        _, total_bytes = torch.accelerator.get_memory_info()
        options["gpu_memory"] = str(total_bytes)
    return make_job(strategy, options)


def template_from_environment() -> validate.Section:
    """Rebuild the Accelerate config from the environment variables that `accelerate launch` sets.

    Source: accelerate 1.15 `utils/launch.py`, `prepare_multi_gpu_env`: FSDP_<KEY> for each key of fsdp_config.
    """
    fsdp = {key.lower(): value for key, value in os.environ.items() if key.startswith("FSDP_")}
    if fsdp.get("fsdp_version", "1") == "2":
        # The launcher sets FSDP1's keys even under FSDP2, where the validation would report them as mistakes.
        fsdp = {key: value for key, value in fsdp.items() if key not in validate.FSDP1_ONLY}
    sizes = {key: int(size) for key, size in parallel_sizes().items() if size.isdigit() and int(size) > 1}
    num_ranks, precision = int(os.environ.get("WORLD_SIZE", "1")), mixed_precision() or "no"
    config: validate.Section = {
        "distributed_type": "FSDP" if is_fsdp_requested() else "NO",
        "mixed_precision": precision,
        # On a machine without GPUs, a mixed-precision template is still planned for GPUs.
        "use_cpu": cpu_ranks.is_requested() and precision == "no",
        "num_processes": num_ranks,
        "num_machines": max(1, num_ranks // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))),
        "fsdp_config": fsdp,
    }
    parallelism = {f"parallelism_config_{key}": size for key, size in sizes.items()}
    return config | ({"parallelism_config": parallelism} if parallelism else {})


def model_name(arguments: "Arguments") -> str:
    """Return the recipe's `model_name_or_path`, or its `config_name` if the recipe trains a new model."""
    return str(arguments.model.model_name_or_path or arguments.recipe.config_name)


def read_model_config(arguments: "Arguments") -> "PreTrainedConfig":
    """Return the config of the recipe's model, pretrained or new. If it cannot be downloaded, a shipped copy is read."""
    name = model_configs.find_config(model_name(arguments))
    config = read_config(name, arguments.recipe.config_overrides, arguments.model.load_in_4bit)
    if arguments.recipe.config_name is not None:
        return config
    chosen, config = choose_class(config, (arguments.training.model_init_kwargs or {}).get("auto_class"))
    config.architectures = [chosen.__name__]
    return config


def template_faults(config: validate.Section, model: torch.nn.Module) -> list[str]:
    """Return all mistakes in an Accelerate config for this model; the model may be on the meta device."""
    return validate.find_faults(config, {type(module).__name__ for module in model.modules()})


def output_faults(arguments: "Arguments") -> Iterator[str]:
    """Yield the reasons why the run cannot write its output directory: permissions or disk space."""
    output = Path(arguments.training.output_dir)
    parent = next(directory for directory in (output, *output.absolute().parents) if directory.is_dir())
    try:
        tempfile.TemporaryDirectory(dir=parent).cleanup()
    except OSError as error:
        yield (
            f"output_dir {output} cannot be written ({error.strerror}). Choose another directory or change its permissions."
        )
        return
    needed = estimate_space(arguments)
    free_bytes = shutil.disk_usage(parent).free
    if needed is not None and needed.total_bytes > free_bytes:
        yield (
            f"output_dir {output} has {format_bytes(free_bytes)} free, but the run writes {needed}. Lower "
            f"save_total_limit, raise save_steps, or use another disk."
        )


def hub_faults(arguments: "Arguments") -> Iterator[str]:
    """Yield the reason why the run cannot push to the Hub from this machine, if any."""
    try:
        read_target(arguments.training)
    except RecipeError as error:
        yield str(error)


def estimate_space(arguments: "Arguments") -> disk_estimate.DiskEstimate | None:
    """Estimate the disk space that the run will use. Returns None if the recipe trains a new model."""
    if arguments.model.model_name_or_path is None:
        return None
    return disk_estimate.estimate(flatten_arguments(arguments))


def describe_batches(arguments: "Arguments", num_ranks: int) -> Iterator[str]:
    """Yield the batch size, tokens, number of steps and learning rate of a run on `num_ranks` ranks, one line each."""
    training = arguments.training
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    rows = batch * accumulation * num_ranks
    yield f"batch: {batch} rows x {accumulation} micro-batches x {num_ranks} ranks = {rows} rows per step"
    if training.max_length is not None:
        at_most = "" if training.packing else "at most "
        yield f"tokens: {at_most}{rows * training.max_length:,} per step ({training.max_length} per row)"
    if training.max_steps > 0:
        yield f"steps: {training.max_steps}, {training.max_steps * rows:,} rows in total"
    else:
        yield f"steps: {training.num_train_epochs:g} epochs; the number of steps is known once the dataset is prepared"
    settings = flatten_arguments(arguments)
    yield f"learning rate: {training.learning_rate:g}, {settings['lr_scheduler_type']}, {settings['optim']}"
