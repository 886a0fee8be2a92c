"""Builds the model of a recipe, loaded or new, with its attention, dtypes and added tokens."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.environment import fsdp_version, is_fsdp_requested
from hf_fsdp_recipes.errors import LoadError, RecipeError
from hf_fsdp_recipes.loading.load_model import initialize_model, load_model, refuse_adapter
from hf_fsdp_recipes.model_class import task_type_of
from hf_fsdp_recipes.precision import mixed_precision_dtype
from hf_fsdp_recipes.training import attention, dtypes
from hf_fsdp_recipes.training.arguments import Arguments
from hf_fsdp_recipes.training.trainers import find_kind

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import ModelConfig

VOCABULARY_MULTIPLE = 64  # a padded vocabulary is faster on tensor cores


def build_model(arguments: Arguments, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
    """Build the model for the trainer. Under FSDP, the weights are read later, when Accelerate shards the model.

    Collective: every rank must call this, with the same arguments.
    """
    dtypes.set_frozen_dtype(arguments.model)
    _choose_checkpointing(arguments)
    training, kind = arguments.training, find_kind(arguments.training)
    arguments.model.lora_task_type = kind.task_type
    is_packed = getattr(training, "packing", False)
    is_wrapped = is_packed and training.packing_strategy == "wrapped"
    # Whether documents share a sequence and must not attend to each other.
    is_divided = (is_packed and not is_wrapped) or (kind.name == "sft" and training.padding_free)
    requested, explicit = arguments.recipe.attention, arguments.model.attn_implementation
    implementation = explicit
    with distributed.sync_errors():
        if explicit is not None and requested != "auto":
            raise RecipeError(
                f"attention: {requested} and attn_implementation: {explicit} are both set. Drop one of them."
            )
        implementation = explicit or attention.select_implementation(requested, training.use_cpu)
    named = explicit or (training.model_init_kwargs or {}).get("attn_implementation")
    is_open = requested == "auto" and named is None
    model = _new_model(arguments, implementation) if arguments.recipe.config_name else _load(arguments, implementation)
    with distributed.sync_errors():
        if task_type_of(type(model)) not in (kind.task_type, None):
            raise RecipeError(
                f"{arguments.model.model_name_or_path or arguments.recipe.config_name} is a {type(model).__name__}, which "
                f"{kind.name} cannot train. Use a causal language model, or hf-fsdp reward for a classifier."
            )
        _check_adapter_names(model, arguments.model)
    if is_divided and is_open and not training.use_cpu:
        attention.avoid_dense_mask(model)
    with distributed.sync_errors():
        if is_divided:
            attention.check_packing(model.config, model.config._attn_implementation)
    found = sorted(set(distributed.gather_objects(model.config._attn_implementation)))
    if len(found) > 1:
        raise RecipeError(
            f"the ranks found different attention implementations: {', '.join(found)}. Install the same packages on every node, "
            f"or set attention: sdpa."
        )
    distributed.print_main(f"attention: {found[0]}")
    if is_wrapped:
        distributed.print_main("packing: wrapped; documents in one sequence attend to each other, as in pretraining")
    saved = arguments.model.lora_modules_to_save or []
    is_embedding_trained = not arguments.model.use_peft or any("embed" in name for name in saved)
    if _add_rows(model, tokenizer, arguments.model) and not is_embedding_trained:
        distributed.print_main(
            "special_tokens: LoRA does not train the new embedding rows, which stay at the mean of the others; to train them, "
            "set lora_modules_to_save: [embed_tokens, lm_head]"
        )
    return model


def build_reference(
    model: "PreTrainedModel", arguments: Arguments, tokenizer: "PreTrainedTokenizerBase"
) -> "PreTrainedModel":
    """Build the reference model for a model from `build_model`. Collective: every rank must call this.

    The reference is not trained, so it is loaded directly in the mixed-precision dtype. FSDP would round fp32 weights to that
    dtype in each forward pass anyway.
    """
    reference = _load(arguments, model.config._attn_implementation, mixed_precision_dtype())
    _add_rows(reference, tokenizer, arguments.model)
    return reference


def _add_rows(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", model_arguments: "ModelConfig") -> bool:
    """Add embedding rows if the tokenizer has more tokens than the model, and return whether rows were added."""
    if len(tokenizer) <= model.get_input_embeddings().num_embeddings:
        return False
    # PEFT resizes an adapter's base model to exactly the tokenizer's length, so pad only without an adapter.
    multiple = None if model_arguments.use_peft else VOCABULARY_MULTIPLE
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple)
    return True


def _check_adapter_names(model: "PreTrainedModel", model_arguments: "ModelConfig") -> None:
    """Check the names in the adapter's settings, because PEFT ignores unknown ones."""
    if not model_arguments.use_peft:
        return
    modules = [name for name, _ in model.named_modules()]
    weights = [name for name, _ in model.named_parameters()]
    for field, known in (
        ("lora_target_modules", modules),
        ("lora_modules_to_save", modules),
        ("lora_target_parameters", weights),
    ):
        wanted = getattr(model_arguments, field)
        if isinstance(wanted, str) and wanted != "all-linear" and not any(re.fullmatch(wanted, name) for name in known):
            unknown = [wanted]
        else:
            names = wanted if isinstance(wanted, list) else []
            unknown = [name for name in names if not any(f".{other}".endswith(f".{name}") for other in known)]
        if unknown:
            examples = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in weights)
            raise RecipeError(
                f"{field} names {', '.join(unknown)}, but {type(model).__name__} has no such name. It has "
                f"{', '.join(examples)}."
            )


def _load(arguments: Arguments, implementation: str | None, dtype: "torch.dtype | None" = None) -> "PreTrainedModel":
    from transformers.utils import find_adapter_config_file
    from trl import get_quantization_config

    model_arguments, training = arguments.model, arguments.training
    name, revision = model_arguments.model_name_or_path, model_arguments.model_revision
    if not is_fsdp_requested():  # otherwise load_model refuses adapters itself
        try:
            found = find_adapter_config_file(name, revision=revision)
        except OSError as error:
            raise LoadError(f"{name} is neither a directory nor a Hub id. Check the path.") from error
        if found is not None:
            refuse_adapter(name, Path(found).parent)
    kwargs: dict[str, Any] = (training.model_init_kwargs or {}) | ({"dtype": dtype} if dtype else {})
    kind = find_kind(training)
    if kind.name == "reward":
        kwargs |= {"auto_class": kind.auto_class, "num_labels": 1}
    quantization = get_quantization_config(model_arguments)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    defaults = {
        "source": arguments.recipe.load_source,
        "dtype": model_arguments.dtype,
        "revision": revision,
        "attn_implementation": implementation,
        "trust_remote_code": training.trust_remote_code,
    }
    return load_model(name, **(defaults | kwargs))


def _new_model(arguments: Arguments, implementation: str | None) -> "PreTrainedModel":
    from transformers import set_seed

    set_seed(arguments.training.seed)  # Trainer sets the seed only after the model exists
    return initialize_model(
        arguments.recipe.config_name or "",
        overrides=arguments.recipe.config_overrides,
        dtype=arguments.model.dtype,
        attn_implementation=implementation,
        **(arguments.training.model_init_kwargs or {}),
    )


def _choose_checkpointing(arguments: Arguments) -> None:
    """Use reentrant activation checkpointing for 4-bit weights under FSDP1; torch's check of recomputed tensors fails otherwise.

    During recomputation, the weight is a different view of its unit's flat parameter (torch 2.13).
    """
    training = arguments.training
    # transformers 5.23 renamed gradient checkpointing.
    name = "activation_checkpointing" if hasattr(training, "activation_checkpointing") else "gradient_checkpointing"
    if fsdp_version() == 1 and arguments.model.load_in_4bit and getattr(training, name):
        kwargs = getattr(training, f"{name}_kwargs") or {}
        setattr(training, f"{name}_kwargs", {**kwargs, "use_reentrant": True})
        distributed.print_main("gradient checkpointing: reentrant, as 4-bit weights under FSDP1 require")
