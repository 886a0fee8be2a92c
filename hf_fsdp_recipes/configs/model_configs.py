"""Finds the copies of model configs that this package ships for the models in its recipes and documentation.

Tools that need only a model's shapes use a copy when the config on the Hub cannot be read: offline, or before access to a
gated model is granted. Training never uses a copy.
"""

import functools
from pathlib import Path

MODELS = Path(__file__).with_name("models")


@functools.cache
def find_config(name: str) -> str:
    """Return `name`, or the path of the shipped config for this Hub id if the config on the Hub cannot be read."""
    file = MODELS / f"{name.replace('/', '--')}.json"
    if Path(name).exists() or not file.is_file():
        return name
    from transformers import PreTrainedConfig

    try:
        PreTrainedConfig.get_config_dict(name)
    except OSError:
        return str(file)
    return name


def describe_source(name: str) -> list[str]:
    """Return a list with the message that the shipped config of this model is used; an empty list if it is not used."""
    if find_config(name) == name:
        return []
    return [
        f"The config of {name} cannot be read (no network, or no access), so the copy shipped with hf-fsdp is used."
    ]
