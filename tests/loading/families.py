"""Tiny models of the architectures of transformers: default configs, made small."""

import contextlib
from typing import Any

WIDTH = 64
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_EXPERTS = 4
# The fields of configs, by the value that each of them gets.
FIELDS_BY_SIZE = [
    (
        WIDTH,
        "hidden_size embed_dim n_embd d_model out_hidden_size projection_dim text_hidden_size "
        "embedding_size q_lora_rank kv_lora_rank lm_head_hidden_size word_embed_proj_dim",
    ),
    (
        2 * WIDTH,
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim n_inner "
        "mlp_hidden_size shared_intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim",
    ),
    (NUM_LAYERS, "num_hidden_layers n_layer depth num_layers encoder_layers decoder_layers"),
    (
        NUM_HEADS,
        "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads",
    ),
    (WIDTH // NUM_HEADS, "head_dim d_kv v_head_dim qk_rope_head_dim qk_nope_head_dim"),
    (NUM_EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok n_group topk_group moe_topk moe_k"),
    (128, "vocab_size vocab_size_per_layer_input hidden_size_per_layer_input"),
    (1, "first_k_dense_replace n_shared_experts"),
    (0, "num_kv_shared_layers"),
]

CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
)
MAX_PARAMETERS = 40_000_000
# Errors of architectures that cannot be sharded, loaded or exported, and why.
LIMITS = {
    "are tied, but Accelerate": "Accelerate shards the two weights apart: encoders used as "
    "decoders, T5 and BART classifiers",
    "Invariant encountered": "Accelerate shards embeddings that _no_split_modules names twice; "
    "name the layer class",
    "`get_input_embeddings` not auto": "Accelerate asks for the input embeddings, and the class "
    "does not name them",
    "does not fit Gemma3For": "shieldgemma2: transformers saves other names than it reads",
    "from several layers": "kimi_k25: transformers stacks weights of several layers",
    "cannot be called on meta tensors": "ibert: its constructor computes with weights",
}


def model_types(auto_class: str) -> list[str]:
    import transformers

    return sorted(getattr(transformers, auto_class)._model_mapping._model_mapping)


def shrink(config: Any) -> Any:
    """Make a config small, with the configs of its towers."""
    sizes = {name: size for size, names in FIELDS_BY_SIZE for name in names.split()}
    sizes |= {
        "num_key_value_heads": NUM_HEADS // 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    for name, size in sizes.items():
        # Some fields are computed from other fields, or differ in each layer.
        with contextlib.suppress(Exception):
            if isinstance(getattr(config, name), int | None):
                setattr(config, name, size)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list):
            with contextlib.suppress(AttributeError):
                setattr(config, name, [*dict.fromkeys(kinds), *kinds][:NUM_LAYERS])
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            shrink(getattr(config, name))
    return config


def build(auto_class: str, model_type: str) -> Any:
    """Return a tiny model with random values."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[model_type]()
    found = getattr(transformers, auto_class)._model_mapping[type(config)]
    model_class = found[0] if isinstance(found, list | tuple) else found
    torch.manual_seed(0)
    return model_class(shrink(config))
