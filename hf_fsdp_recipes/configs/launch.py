"""Checks that the launched ranks train one model together, with features that this package supports."""

import os
from typing import TYPE_CHECKING

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.configs.validate import find_unsupported
from hf_fsdp_recipes.environment import mixed_precision, parallel_sizes
from hf_fsdp_recipes.errors import TemplateError

if TYPE_CHECKING:
    from transformers import TrainingArguments


def check_launch(training: "TrainingArguments | None" = None) -> None:
    """Refuse unsupported parallelism or precision, and a Trainer that sees fewer ranks than were launched.

    Not a collective, but every rank finds the same.

    Args:
        training: the run's arguments; None to check the launcher's settings only.

    Raises:
        TemplateError: lists all faults.
    """
    config = getattr(training, "parallelism_config", None)
    faults = list(find_unsupported(parallel_sizes() if config is None else vars(config), mixed_precision()))
    launched = max(int(os.environ.get("WORLD_SIZE", "1")), distributed.world_size())
    if training is not None and training.world_size < launched:
        faults.append(
            f"WORLD_SIZE is {launched} but Trainer sees {training.world_size} "
            f"process{'es' * (training.world_size > 1)}. Start the script with accelerate launch --config_file and a template "
            f"of accelerate_configs/."
        )
    if faults:
        raise TemplateError(" ".join(faults))
