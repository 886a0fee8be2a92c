"""Configs of tiny models for the architectures of transformers, and the lists of architectures in docs/models.md."""

import re

from tests.recipes.launching import ROOT

CLASSES = (
    "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
)  # fmt: skip
PAGE = ROOT / "docs" / "models.md"


def model_types(auto_class):
    import transformers

    return sorted(getattr(transformers, auto_class)._model_mapping._model_mapping)


def small_config(auto_class, model_type):
    """Return a model class and its config: transformers' default one, made small."""
    import transformers
    from hf_fsdp_recipes.training.tiny_config import tiny_config
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    model_class = getattr(transformers, auto_class)._model_mapping[type(config)]
    model_class = model_class[0] if isinstance(model_class, list | tuple) else model_class
    sub = config.sub_configs.get("text_config")
    if sub is not None and model_class.config_class is sub:
        config = config.get_text_config()
    config = tiny_config(config, 64)
    config.architectures = [model_class.__name__]
    return model_class, config


def listed(auto_class):
    """Return the types that docs/models.md lists for a class, because they fail, are refused, or cannot be made small."""
    section = PAGE.read_text().partition(f"## {auto_class}")[2].partition("\n## ")[0]
    return {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    }
