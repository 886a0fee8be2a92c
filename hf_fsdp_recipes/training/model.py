"""The model of a recipe: loaded or new, with its attention, its dtypes and its added tokens. Reads no weights yet."""

import os
from typing import Any

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.environment import is_fsdp_requested
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.loading.load_model import initialize_model, load_model
from hf_fsdp_recipes.training import attention, dtypes
from hf_fsdp_recipes.training.arguments import Arguments


def build_model(arguments: Arguments, tokenizer: Any) -> Any:
    """Build what SFTTrainer trains. Collective: every rank must call this, with the same arguments.

    Raises:
        LoadError, RecipeError: the same on every rank.
    """
    dtypes.follow_precision(arguments.model)
    _choose_checkpointing(arguments)
    implementation = None
    with distributed.sync_errors():
        implementation = _attention(arguments)
    model = _new_model(arguments, implementation) if arguments.recipe.config_name else _load(arguments, implementation)
    with distributed.sync_errors():
        if is_packed(arguments.training):
            attention.check_packing(model.config, model.config._attn_implementation)
    attention.announce(model.config._attn_implementation, arguments.training)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        # PEFT gives an adapter's base as many rows as the tokenizer has tokens; a whole model's may be more, for speed.
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=None if arguments.model.use_peft else 64)
        _warn_of_untrained_rows(arguments.model)
    return model


def _warn_of_untrained_rows(model_arguments: Any) -> None:
    """Say that an adapter leaves the rows of added tokens as they were made, unless the embeddings train too."""
    saved = model_arguments.lora_modules_to_save or []
    if model_arguments.use_peft and not any("embed" in name for name in saved):
        distributed.print_main(
            "special_tokens: the adapter leaves their new rows at the mean of the others; to train them: "
            "lora_modules_to_save: [embed_tokens, lm_head]"
        )


def is_packed(training: Any) -> bool:
    """Tell whether several documents share a sequence and must not see each other."""
    return training.padding_free or (training.packing and training.packing_strategy != "wrapped")


def _attention(arguments: Arguments) -> str | None:
    wish, explicit = arguments.recipe.attention, arguments.model.attn_implementation
    if explicit is not None and wish != "auto":
        raise RecipeError(f"attention: {wish} and attn_implementation: {explicit}. Remedy: one of the two.")
    return explicit or attention.choose(wish, arguments.training.use_cpu)


def _load(arguments: Arguments, implementation: str | None) -> Any:
    from trl import get_quantization_config

    model_arguments, training = arguments.model, arguments.training
    quantization = get_quantization_config(model_arguments)
    model = load_model(
        model_arguments.model_name_or_path,
        source=arguments.recipe.load_source,  # type: ignore[arg-type]  # one of the field's choices
        dtype=model_arguments.dtype,
        revision=model_arguments.model_revision,
        attn_implementation=implementation,
        trust_remote_code=getattr(training, "trust_remote_code", False),
        **({} if quantization is None else {"quantization_config": quantization}),
        **(training.model_init_kwargs or {}),
    )
    training.model_init_kwargs = None
    return model


def _new_model(arguments: Arguments, implementation: str | None) -> Any:
    from transformers import set_seed

    set_seed(arguments.training.seed)  # Trainer sets it too, but only when the model is there
    return initialize_model(
        arguments.recipe.config_name or "",
        overrides=arguments.recipe.config_overrides,
        dtype=arguments.model.dtype,
        attn_implementation=implementation,
    )


def _choose_checkpointing(arguments: Arguments) -> None:
    """Make activation checkpointing reentrant where FSDP1 holds 4-bit weights, which it needs there.

    Source: torch 2.13; the recomputed forward sees a 4-bit weight as another view of its unit, and the check for
    equal metadata of non-reentrant checkpointing fails.
    """
    training = arguments.training
    is_fsdp1 = is_fsdp_requested() and os.environ.get("FSDP_VERSION", "1") == "1"
    if is_fsdp1 and arguments.model.load_in_4bit and training.activation_checkpointing:
        given = training.activation_checkpointing_kwargs or {}
        training.activation_checkpointing_kwargs = {**given, "use_reentrant": True}
        distributed.print_main("gradient checkpointing: use_reentrant, which 4-bit weights under FSDP1 need")
