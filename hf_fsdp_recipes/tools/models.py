"""Finds copies of model configs that this package ships for the models in its recipes.

Tools that need only a model's shapes use a copy when the config on the Hub cannot be read: offline, or before access to a gated
model is granted. Training never uses a copy.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_recipes.errors import ToolError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

MODELS = Path(__file__).with_name("models")


def find_config(name: str) -> "PreTrainedConfig":
    """Return the config of a Hub id or directory, or the shipped copy; raise a ToolError if there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        copy = MODELS / f"{name.replace('/', '--')}.json"
        if not copy.is_file():
            raise ToolError(f"the config of {name} cannot be read: {' '.join(str(error).split())}") from error
        logger.warning("the config of %s cannot be read (no network or no access), so the shipped copy is used", name)
        return AutoConfig.from_pretrained(copy)
