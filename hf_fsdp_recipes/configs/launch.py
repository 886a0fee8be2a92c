"""Checks that the launched ranks train one model together, with features that this package supports."""

import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.configs.validate import find_unknown_layers, find_unsupported
from hf_fsdp_recipes.environment import mixed_precision, parallel_sizes
from hf_fsdp_recipes.errors import TemplateError

if TYPE_CHECKING:
    from transformers import TrainingArguments


def check_launch(training: "TrainingArguments | None" = None) -> None:
    """Raise a TemplateError if parallelism or precision is unsupported, or if Trainer sees fewer ranks than were launched.

    Without `training`, only the launcher's settings are checked. Not a collective, but every rank reaches the same result.
    """
    config = getattr(training, "parallelism_config", None)
    faults = list(find_unsupported(parallel_sizes() if config is None else vars(config), mixed_precision()))
    launched = max(int(os.environ.get("WORLD_SIZE", "1")), distributed.world_size())
    sizes = [int(size) for key, size in parallel_sizes().items() if key.endswith("_size")]
    if training is not None and sizes and math.prod(sizes) != launched:
        faults.append(
            f"parallelism_config is for {math.prod(sizes)} ranks, but {launched} were launched. Set dp_replicate_size to the "
            f"number of nodes and dp_shard_size to the ranks per node."
        )
    if training is not None and training.world_size < launched:
        faults.append(_describe_unseen(training.world_size, launched))
    if faults:
        raise TemplateError(" ".join(faults))


def check_num_processes(seen: int) -> None:
    """Raise a TemplateError if Trainer or Accelerator sees fewer processes than were launched. Not a collective."""
    launched = max(int(os.environ.get("WORLD_SIZE", "1")), distributed.world_size())
    if seen < launched:
        raise TemplateError(_describe_unseen(seen, launched))


def _describe_unseen(seen: int, launched: int) -> str:
    return (
        f"WORLD_SIZE is {launched} but Trainer sees {seen} process{'es' * (seen > 1)}. Start the script with accelerate launch "
        f"--config_file and a template from accelerate_configs/."
    )


def check_wrap_classes(model_classes: Iterable[str]) -> None:
    """Raise a TemplateError if the model lacks a layer class that the launcher's config names for wrapping. Not a collective."""
    names = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    if faults := list(find_unknown_layers(names, set(model_classes))):
        raise TemplateError(" ".join(faults))
