"""Chooses a model's class: the one requested, or the one that its config declares in `architectures`.

`build` records the class in the config, so that anything built later from this config, such as an export, has the same class.

Source: trl 1.16 `create_model_from_path`; transformers 5.23 `auto_factory.py`.
"""

from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes.errors import LoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    ModelClass = type[PreTrainedModel] | type[_BaseAutoModelClass]

AutoClass = type | str | None
# PEFT's task type for each auto class that can be trained. A model class listed under two auto classes, such as
# Gemma3ForConditionalGeneration, belongs to the one that comes first here.
TASK_TYPES = {
    "AutoModelForImageTextToText": "CAUSAL_LM",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}
CAUSAL = "AutoModelForCausalLM"


def choose_class(
    config: "PreTrainedConfig", auto_class: AutoClass = None, trust_remote_code: bool = False
) -> tuple["ModelClass", "PreTrainedConfig"]:
    """Return the class to build, and the config to build it from. Not a collective.

    `auto_class` is a class or a class name. None means the class that the config declares, or AutoModelForCausalLM if
    transformers lacks it. For a model with its own code, the class returned is an auto class. If the class is only the text
    part of a multimodal model, the config returned is the text config.
    Raises a LoadError if the class cannot be trained, does not fit the config, or is only the text part without being
    requested by `auto_class`.
    """
    chosen = _find_class(config, auto_class, trust_remote_code)
    if hasattr(chosen, "_model_mapping"):
        if trust_remote_code and chosen.__name__ in (getattr(config, "auto_map", None) or {}):
            return chosen, config
        chosen = _resolve(chosen, config)
    elif not task_type_of(chosen) and chosen.__module__.startswith("transformers."):
        raise LoadError(
            f"{chosen.__name__} ({'auto_class' if auto_class else 'architectures in config.json'}) has no head that can be "
            f"trained here. Pass auto_class: {', '.join(TASK_TYPES)}, or one of their classes."
        )
    if getattr(chosen, "config_class", None) is not config.sub_configs.get("text_config", config):
        return chosen, config
    if auto_class is None:
        raise LoadError(
            f"{chosen.__name__} is only the text part of a {config.model_type} model, whose config.json declares "
            f"{declared_class(config) or 'no class'}. Pass auto_class={CAUSAL} to train and export the text part alone, or the "
            f"class of the full model."
        )
    text = config.get_text_config()
    text.name_or_path = config.name_or_path
    return chosen, text


def for_new_model(config: "PreTrainedConfig", auto_class: AutoClass) -> AutoClass:
    """Return `auto_class`, or AutoModelForCausalLM if it is None and a new model's config declares a class without a head."""
    import transformers

    declared = getattr(transformers, declared_class(config) or "", None)
    is_bare = isinstance(declared, type) and not task_type_of(declared)
    return CAUSAL if auto_class is None and is_bare else auto_class


def declared_class(config: "PreTrainedConfig") -> str | None:
    """Return the name of the class that a config declares, or None."""
    architectures = getattr(config, "architectures", None)
    return architectures[0].removeprefix("FSDP") if architectures else None


def build(config: "PreTrainedConfig", auto_class: AutoClass = None, **from_config_kwargs: Any) -> "PreTrainedModel":
    """Build a model like `from_config`, of the class that `choose_class` returns, and record the class in its config."""
    trust_remote_code = from_config_kwargs.pop("trust_remote_code", False)
    chosen, config = choose_class(config, auto_class, trust_remote_code)
    if hasattr(chosen, "_model_mapping"):
        model = chosen.from_config(config, trust_remote_code=trust_remote_code, **from_config_kwargs)
    else:
        model = chosen._from_config(config, **from_config_kwargs)
    model.config.architectures = [type(model).__name__]
    return model


def task_type_of(model_class: type) -> str | None:
    """Return PEFT's task type for a model class, or None if no auto class in TASK_TYPES lists it."""
    auto = _auto_class_of(model_class)
    return TASK_TYPES[auto] if auto else None


def _auto_class_of(model_class: type) -> str | None:
    names = {cls.__name__ for cls in model_class.__mro__}
    for auto in TASK_TYPES:
        if getattr(model_class, "_auto_class", None) == auto or names & _class_names(auto):
            return auto
    return None


def _class_names(auto: str) -> set[str]:
    import transformers

    listed = getattr(transformers, auto)._model_mapping._model_mapping.values()
    return {name for names in listed for name in ((names,) if isinstance(names, str) else names)}


def _find_class(config: "PreTrainedConfig", auto_class: AutoClass, trust_remote_code: bool) -> "ModelClass":
    """Return the requested or declared class: a model class or an auto class."""
    import transformers

    if isinstance(auto_class, type):
        return auto_class
    if auto_class is not None:
        found = getattr(transformers, auto_class, None)
        if not isinstance(found, type):
            raise LoadError(
                f"auto_class is {auto_class!r}, which transformers does not have. Use {CAUSAL}, for example."
            )
        return found
    own_code = [name for name in TASK_TYPES if name in (getattr(config, "auto_map", None) or {})]
    if own_code and trust_remote_code:
        declared = declared_class(config)
        named = [name for name in own_code if str(config.auto_map[name]).endswith(f".{declared}")]
        return getattr(transformers, (named or own_code)[0])
    declared = getattr(transformers, declared_class(config) or "", None)
    if not isinstance(declared, type) or not hasattr(declared, "config_class"):
        return getattr(transformers, CAUSAL)
    # Some checkpoints declare the class of another model_type. Choose by the model_type, as transformers' auto classes do.
    auto = _auto_class_of(declared)
    return declared if auto is None or isinstance(config, declared.config_class) else getattr(transformers, auto)


def _resolve(auto_class: "type[_BaseAutoModelClass]", config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """Return the model class that an auto class builds from a config."""
    from transformers.models.auto.auto_factory import _get_model_class

    if auto_class.__name__ not in TASK_TYPES:
        raise LoadError(f"auto_class is {auto_class.__name__}, which is not supported. Use {', '.join(TASK_TYPES)}.")
    if type(config) not in auto_class._model_mapping:
        raise LoadError(
            f"{auto_class.__name__} has no class for model_type {config.model_type!r}. Pass another auto_class: "
            f"{', '.join(TASK_TYPES)}; a model with its own code needs trust_remote_code."
        )
    return _get_model_class(config, auto_class._model_mapping)
