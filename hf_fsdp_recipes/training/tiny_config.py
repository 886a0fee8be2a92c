"""Shrinks a model's config but keeps the architecture: the tiny model has the same classes, weight tying and masking."""

import contextlib
import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NUM_LAYERS = 2
HEAD_SIZE = 16
MAX_HEADS = 4
MAX_EXPERTS = 4
# Fields with one entry per layer; NUM_LAYERS entries are kept, of different kinds if possible.
PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers")
# Fields of Mamba layers: the number and size of the heads, and the factor by which these layers widen the hidden size.
STATE_SPACE_HEADS = (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand"))
# Fields of a vision or audio tower: its number of layers, lists of layer indices, and the text model's hidden size, to which
# the tower's output is projected.
TOWER_LAYERS = ("num_hidden_layers", "depth", "encoder_layers", "num_global_layers")
TOWER_LAYER_LISTS = ("fullatt_block_indexes", "deepstack_visual_indexes")
TEXT_HIDDEN_SIZES = ("out_hidden_size", "projection_dim", "hidden_size", "text_hidden_size", "vision_output_dim")


def tiny_config(config: "PretrainedConfig", vocab_size: int | None = None) -> "PretrainedConfig":
    """Return a config of the same class for a tiny model; `vocab_size=None` keeps the number of embedding rows.

    Vision and audio towers get NUM_LAYERS layers, but keep their width, because models use different fields for the width.
    """
    tiny = copy.deepcopy(config)
    text = tiny.get_text_config()
    has_layers_of_other_head_size = "head_dim" in (getattr(text, "per_layer_attributes", None) or ())  # as in Gemma 4
    if getattr(text, "is_heterogeneous", False):
        text.per_layer_config = None
    all_heads = getattr(text, "num_attention_heads", None) or MAX_HEADS  # state-space models have no attention heads
    heads = min(all_heads, MAX_HEADS)
    groups = getattr(text, "num_key_value_heads", None)
    if groups:  # keep the number of query heads per key head, if possible
        text.num_key_value_heads = max(1, heads * groups // all_heads)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // all_heads
    for name in tiny.sub_configs:
        tower = getattr(tiny, name, None)
        if tower is not None and tower is not text:
            _shrink_tower(tower, text.hidden_size, heads * HEAD_SIZE)
    _assign(text, "num_attention_heads", heads)
    text.hidden_size = heads * HEAD_SIZE
    text.num_hidden_layers = NUM_LAYERS
    if getattr(text, "head_dim", None):
        _assign(text, "head_dim", HEAD_SIZE)
    width = 2 * text.hidden_size
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim"):
        if value := getattr(text, name, None):
            _assign(text, name, [width] * len(value) if isinstance(value, list) else width)
    for count, head, factor in STATE_SPACE_HEADS:
        if getattr(text, count, None) and getattr(text, factor, None):
            setattr(text, count, int(getattr(text, factor) * text.hidden_size) // getattr(text, head))
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = 0
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"):
        largest = MAX_EXPERTS // 2 if name == "num_experts_per_tok" else MAX_EXPERTS
        if getattr(text, name, None):
            setattr(text, name, min(getattr(text, name), largest))
    for name in PER_LAYER_LISTS:
        entries = getattr(text, name, None)
        if isinstance(entries, list):
            _assign(text, name, [*dict.fromkeys(entries), *entries][:NUM_LAYERS])
    if has_layers_of_other_head_size:
        text.per_layer_config = {NUM_LAYERS - 1: {"head_dim": 2 * HEAD_SIZE}}
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope:  # the rotated dimensions of a head, split between time, height and width
        others = [max(1, size * HEAD_SIZE // head_size) for size in rope["mrope_section"][1:]]
        rope["mrope_section"] = [sum(rope["mrope_section"]) * HEAD_SIZE // head_size - sum(others), *others]
    if vocab_size is not None:
        text.vocab_size = vocab_size
        if getattr(text, "vocab_size_per_layer_input", None):
            text.vocab_size_per_layer_input = vocab_size
        for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
            setattr(text, name, number)
    return tiny


def _assign(config: "PretrainedConfig", name: str, value: object) -> None:
    """Set a field, unless the config computes it from others."""
    with contextlib.suppress(AttributeError):
        setattr(config, name, value)


def _shrink_tower(tower: "PretrainedConfig", text_hidden_size: int, hidden_size: int) -> None:
    """Shrink a vision or audio tower to NUM_LAYERS layers, with the tiny text model's hidden size as output size."""
    for name in TOWER_LAYERS:
        if getattr(tower, name, None):
            setattr(tower, name, min(getattr(tower, name), NUM_LAYERS))
    for name in TOWER_LAYER_LISTS:
        if getattr(tower, name, None):
            setattr(tower, name, [NUM_LAYERS - 1])
    own = "embed_dim" if hasattr(tower, "embed_dim") else "hidden_size"
    for name in TEXT_HIDDEN_SIZES:
        if name != own and getattr(tower, name, None) == text_hidden_size:
            setattr(tower, name, hidden_size)
