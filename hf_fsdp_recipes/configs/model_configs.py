"""Published configs of the models named in recipes and documentation, for tools that need only a model's shapes.

Tools use them when the real config cannot be read: offline, or before access to a gated model is granted. Training
never uses them.
"""

import functools
from pathlib import Path

MODELS = Path(__file__).with_name("models")


@functools.cache
def find_config(name: str) -> str:
    """Return `name`, or the file of the shipped config if `name` is a known Hub id whose config cannot be read."""
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
    """If the shipped config is used, return a line that says so; otherwise, an empty list."""
    if find_config(name) == name:
        return []
    return [
        f"The config of {name} cannot be read (no network, or no access), so the shapes are those shipped with hf-fsdp."
    ]
