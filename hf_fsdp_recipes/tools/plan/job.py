"""Reads the job that `hf-fsdp sft` would run.

It consists of the recipe's arguments and the environment variables that the launcher sets.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from transformers import AutoConfig, PreTrainedConfig

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.tools.files import find_file
from hf_fsdp_recipes.tools.launch import read_launch
from hf_fsdp_recipes.training.arguments import Arguments, parse_arguments
from hf_fsdp_recipes.training.checks import raise_mistakes
from hf_fsdp_recipes.upstream.accelerate_internals import prepare_multi_gpu_env

GPUS_OF_NODE = 8  # unless the job has several nodes
# Options that change the memory of a step, but that the plan does not know.
NOT_COUNTED = (
    "use_liger_kernel",
    "activation_offloading",
    "torch_compile",
    "auto_find_batch_size",
    "label_smoothing_factor",
)
NOT_COUNTED_BY_LAUNCHER = (
    "fsdp_activation_checkpointing_offload",
    "parallelism_config_cp_size",
    "parallelism_config_sp_size",
    "parallelism_config_tp_size",
)


class Request(NamedTuple):
    """The command line of a job."""

    recipe: str | None
    template: str
    options: list[str]

    def change(self, options: str) -> "Request":
        """Return the same command line with further options, or with another template."""
        words = shlex.split(options)
        if words[0] == "--accelerate_config":
            return self._replace(template=words[1])
        return self._replace(options=[*self.options, *words])

    def read(self) -> "Job":
        """Return the job. Raises what `read_job` raises."""
        return read_job(*self)


class Job(NamedTuple):
    """A training job."""

    arguments: Arguments  # of the recipe
    environment: dict[str, str]  # of a rank
    num_ranks: int  # on all nodes
    num_nodes: int
    on_cpu: bool

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks shard the model. Otherwise, each rank has a full copy."""
        return "FSDP_VERSION" in self.environment

    @property
    def is_offloaded(self) -> bool:
        """Whether shards, their gradients and the optimizer's state are in host memory."""
        return self.environment.get("FSDP_OFFLOAD_PARAMS") == "true" and not self.on_cpu

    @property
    def gpus_of_node(self) -> int:
        """The GPUs of a node. A single node with many ranks stands for several."""
        if self.num_nodes > 1:
            return self.num_ranks // self.num_nodes
        return GPUS_OF_NODE

    @property
    def ranks_of_node(self) -> int:
        """The ranks on a node."""
        return min(self.num_ranks, self.gpus_of_node)

    @property
    def has_fixed_ranks(self) -> bool:
        """Whether the template gives the sizes of replicas, which must fit the number of ranks."""
        return "ACCELERATE_USE_PARALLELISM_CONFIG" in self.environment

    @property
    def is_joined(self) -> bool:
        """Whether TRL joins the rows of a batch into one.

        The condition is copied from `SFTTrainer.__init__`.
        """
        training = self.arguments.training
        return training.padding_free or (
            training.packing and training.packing_strategy.startswith("bfd")
        )

    def is_padded(self, num_rows: int) -> bool:
        """Whether batches of so many rows are padded."""
        return num_rows > 1 and not (self.arguments.training.packing or self.is_joined)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows of a micro-batch, tokens that a rank has of a row).

        A row has 1024 tokens if the recipe has no `max_length`.
        """
        training = self.arguments.training
        length = training.max_length or 1024
        num_parts = int(self.environment.get("PARALLELISM_CONFIG_CP_SIZE", "1"))
        return training.per_device_train_batch_size, length // num_parts

    @property
    def not_counted(self) -> list[str]:
        """Names of options that are set and change the memory, but that the plan does not know."""
        training = self.arguments.training
        names = [name for name in NOT_COUNTED if getattr(training, name)]
        checkpointing: Any = training.gradient_checkpointing_kwargs or {}
        if checkpointing.get("offload"):
            names.append("gradient_checkpointing_kwargs: offload")
        for option in NOT_COUNTED_BY_LAUNCHER:
            if self.environment.get(option.upper(), "1") not in ("1", "false"):
                names.append(option)
        return names


def read_job(recipe: str | None, template: str, options: Sequence[str]) -> Job:
    """Return the job of a command line.

    Options of the launcher and fields of the recipe can be in any order.

    Raises:
        RecipeError: a file does not exist or cannot be read, an option is unknown, or the template
            is not for FSDP2.
    """
    config = ["--config", str(find_file("recipe", recipe))] if recipe else []
    launch = read_launch(
        find_file("template", template), ["--main_process_port=0", *config, *options]
    )
    environment = prepare_multi_gpu_env(launch)
    if environment.get("FSDP_VERSION", "2") != "2":
        raise ToolError(
            f"{template} is for FSDP1, which cannot be planned. Use one with fsdp_version: 2."
        )
    # So that any machine can read a recipe for GPUs.
    environment["ACCELERATE_USE_CPU"] = "true"
    words = [*launch.training_script_args, "--use_cpu=true"]
    with patch.dict(os.environ, environment):
        arguments = parse_arguments(words)
        if not arguments.mixture.datasets:
            # Unlike `sft`, a plan needs no rows.
            arguments.script.dataset_name = arguments.script.dataset_name or "rows"
        raise_mistakes(arguments)
    return Job(arguments, environment, launch.num_processes, launch.num_machines, launch.use_cpu)


def read_config(job: Job) -> PreTrainedConfig:
    """Return the config of the job's model, with the recipe's overrides.

    Raises a ToolError if the config cannot be read or changed.
    """
    recipe = job.arguments.recipe
    config = find_config(recipe.config_name or str(job.arguments.model.model_name_or_path))
    if recipe.config_overrides:
        with explained(ToolError, f"config_overrides: {recipe.config_overrides} cannot be used"):
            config.update_from_string(recipe.config_overrides)
    return config


def find_config(name: str) -> PreTrainedConfig:
    """Return the config of a directory or Hub id.

    A Hub id with a copy in models/ needs neither network nor access rights.
    """
    copy = Path(__file__).parents[1] / "models" / f"{name.replace('/', '--')}.json"
    has_copy = copy.is_file() and not Path(name).is_dir()
    with explained(ToolError, f"the config of {name} cannot be read"):
        return AutoConfig.from_pretrained(copy if has_copy else name)
