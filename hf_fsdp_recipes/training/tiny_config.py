"""Shrinks a config to a tiny model of the same architecture: same classes, weight tying and masking."""

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NUM_LAYERS = 2
HEAD_SIZE = 16
MAX_HEADS = 4
MAX_EXPERTS = 4
# Fields with one entry per layer; the first NUM_LAYERS entries are kept.
PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers")


def tiny_config(config: "PretrainedConfig", vocab_size: int | None = None) -> "PretrainedConfig":
    """Return a config of the same class for a tiny model; `vocab_size=None` keeps the number of embedding rows."""
    tiny = copy.deepcopy(config)
    text = tiny.get_text_config()
    heads = min(text.num_attention_heads, MAX_HEADS)
    groups = getattr(text, "num_key_value_heads", None)
    if groups:  # keep the number of query heads per key head, if possible
        text.num_key_value_heads = max(1, heads * groups // text.num_attention_heads)
    text.num_attention_heads = heads
    text.hidden_size = heads * HEAD_SIZE
    text.num_hidden_layers = NUM_LAYERS
    if getattr(text, "head_dim", None):
        text.head_dim = HEAD_SIZE
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim"):
        if getattr(text, name, None):
            setattr(text, name, 2 * text.hidden_size)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(text, name, None):
            setattr(text, name, min(getattr(text, name), MAX_EXPERTS))
    if getattr(text, "num_experts_per_tok", None):
        text.num_experts_per_tok = min(text.num_experts_per_tok, MAX_EXPERTS // 2)
    for name in PER_LAYER_LISTS:
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, getattr(text, name)[:NUM_LAYERS])
    if vocab_size is not None:
        text.vocab_size = vocab_size
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(text, name, None)
    return tiny
