"""Model FLOPs equal counts by hand and by torch.

Padding is not counted, and only known devices have a peak.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from hf_fsdp_recipes.metrics.flops import (
    ModelFlops,
    count_tokens,
    find_model_flops,
    find_peak_flops,
)
from tests.conftest import tiny_config

ROWS, LENGTH = 2, 48
HEAD = 32 * 307
# A layer of the tiny Llama: q and o, k and v with two of four heads, three matrices of the MLP.
LLAMA_LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 52
BY_HAND = {
    "llama": 2 * LLAMA_LAYER + HEAD,
    "llama_tied": 2 * LLAMA_LAYER + HEAD,  # a tied head costs the same
    "gpt2": 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + HEAD,
    "qwen3_moe": 2 * (2 * 32 * 32 + 2 * 32 * 16 + 32 * 5 + 2 * 3 * 32 * 24)
    + HEAD,  # router; 2 of 5 experts
    "mixtral": 2 * (2 * 32 * 32 + 2 * 32 * 16 + 32 * 4 + 2 * 3 * 32 * 52)
    + HEAD,  # router; 2 of 4 experts
}


def build(kind, lora=None):
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(tiny_config(kind), **options)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **lora))
        # As with activation checkpointing: the backward pass goes through all layers.
        model.enable_input_require_grads()
    return model.train()


def counted_by_torch(model):
    ids = torch.randint(3, 300, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", BY_HAND)
def test_full_fine_tuning_costs_what_torch_counts(kind):
    model = build(kind)
    flops = find_model_flops(model)
    assert flops.matmul_parameters == flops.trainable_parameters == BY_HAND[kind]
    assert (flops.attention_width, flops.window_width) == (2 * 4 * (8 + 8), 0)
    assert flops.training(ROWS * LENGTH, ROWS * LENGTH**2) == pytest.approx(
        counted_by_torch(model), rel=0.02
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_lora_skips_the_gradients_of_frozen_parameters(kind):
    model = build(
        kind, {"target_modules": ["q_proj", "v_proj"] if kind == "qwen3_moe" else "all-linear"}
    )
    flops = find_model_flops(model)
    assert flops.matmul_parameters - flops.trainable_parameters == BY_HAND[kind]
    assert flops.training(ROWS * LENGTH, ROWS * LENGTH**2) == pytest.approx(
        counted_by_torch(model), rel=0.02
    )


def test_adapter_of_experts_counts_for_the_experts_of_a_token():
    targets = {
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    sizes = (32 + 2 * 24) + (24 + 32)  # in and out of both products
    flops = find_model_flops(build("qwen3_moe", targets))
    assert flops.trainable_parameters == 2 * 2 * 4 * sizes  # layers, experts per token, LoRA rank


def test_windows_limit_attention():
    flops = find_model_flops(build("gpt_oss"))  # one layer of two has a window of 16 tokens
    assert (flops.attention_width, flops.window_width, flops.window) == (64, 64, 16)
    assert ModelFlops(0, 0, 10, 3, 4).training(tokens=8, pairs=64) == 6 * (10 * 64 + 3 * 4 * 8)


def test_4bit_layers_count_their_unpacked_weights():
    from bitsandbytes.nn import Linear4bit

    model = build("llama_wide")
    before = find_model_flops(model).matmul_parameters
    layer = model.model.layers[0].mlp
    packed = Linear4bit(layer.up_proj.in_features, layer.up_proj.out_features, bias=False)
    packed.weight = torch.nn.Parameter(
        torch.empty(packed.weight.numel() // 2, 1, dtype=torch.uint8), False
    )
    layer.up_proj = packed
    assert find_model_flops(model).matmul_parameters == before


IDS = [[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 5]]
TOKENS = {  # inputs, and the lengths of the sequences that they hold
    "padding": (
        {"input_ids": IDS, "attention_mask": [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]},
        [4, 6],
    ),
    "packed": ({"input_ids": [[5] * 7], "position_ids": [[0, 1, 2, 0, 1, 2, 3]]}, [3, 4]),
    "filler of a packed row": (
        {"input_ids": [[5] * 8], "position_ids": [[0, 1, 2, 0, 1, 0, 0, 0]]},
        [3, 2],
    ),
    "no mask": ({"input_ids": IDS}, [6, 6]),
    "4-D mask": ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6).tolist()}, [6, 6]),
}


@pytest.mark.parametrize("case", TOKENS)
def test_padding_is_not_counted(case):
    inputs, lengths = TOKENS[case]
    counted = count_tokens({name: torch.tensor(value) for name, value in inputs.items()}).tolist()
    assert counted == [sum(lengths), sum(length**2 for length in lengths)]


PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A10G": 70,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
    "GAUDI2": 432,
}


def test_peak_is_found_by_the_devices_full_name_only():
    assert {name: find_peak_flops(name, "bfloat16") / 1e12 for name in PEAKS} == pytest.approx(
        PEAKS
    )
    for name in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "cpu"):
        with pytest.raises(ValueError, match="peak FLOP/s known"):
            find_peak_flops(name, "bfloat16")
    with pytest.raises(ValueError, match="no float32 peak"):
        find_peak_flops("NVIDIA A10G", "float32")
