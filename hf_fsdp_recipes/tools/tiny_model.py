"""Makes the config of a tiny model from that of a real one."""

from copy import deepcopy
from typing import Any

# Values of a tiny config, and the fields that get them unless they are 0 or None.
FIELDS = {
    64: "hidden_size embed_dim n_embd d_model out_hidden_size projection_dim text_hidden_size "
    "embedding_size q_lora_rank kv_lora_rank lm_head_hidden_size word_embed_proj_dim "
    "input_embedding_size output_embedding_size hidden_size_per_layer_input",
    128: "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim n_inner "
    "mlp_hidden_size shared_intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim mamba_d_ssm",
    2: "num_hidden_layers n_layer depth num_layers encoder_layers decoder_layers "
    "num_experts_per_tok n_group topk_group moe_topk moe_k",
    4: "num_attention_heads n_head num_heads encoder_attention_heads "
    "decoder_attention_heads mamba_n_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts",
    16: "head_dim d_kv v_head_dim qk_rope_head_dim qk_nope_head_dim rotary_dim mamba_d_state "
    "mamba_chunk_size",
    32: "qk_head_dim mamba_d_head global_head_dim",
    1: "first_k_dense_replace n_shared_experts",
    0: "num_kv_shared_layers pad_token_id bos_token_id eos_token_id",
}
SIZES = {name: size for size, names in FIELDS.items() for name in names.split()}


def shrink(config: Any, num_tokens: int) -> Any:
    """Return a tiny config of the same class, without dropout.

    Its parts, such as the config of a vision tower, are tiny too. Tied weights stay tied. Of
    several kinds of layers, two kinds are kept.
    """
    tiny = deepcopy(config)
    fields = vars(tiny)
    depth = fields.get("num_hidden_layers")
    is_grouped = fields.get("num_key_value_heads") != fields.get("num_attention_heads")
    sizes = SIZES | {
        "vocab_size": num_tokens,
        "vocab_size_per_layer_input": num_tokens,
        "num_key_value_heads": 2 if is_grouped else 4,
    }
    for name, value in fields.items():
        small = value
        if hasattr(value, "sub_configs"):
            small = shrink(value, num_tokens)
        elif isinstance(value, dict) and "mrope_section" in value:
            # Parts of half of a head, for time, height and width.
            value["mrope_section"] = [int(8 * value.get("partial_rotary_factor", 1)) - 2, 1, 1]
        elif isinstance(value, list) and len(value) == depth:  # an entry for each layer
            small = [*dict.fromkeys(value), *value][:2]
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            small = 0.0
        elif isinstance(value, int) and value:
            small = sizes.get(name, value)
        fields[name] = small
    tiny.dtype = None
    return tiny
