"""Model FLOPs equal counts by hand and by torch, and only known devices have a peak."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_fsdp_recipes.metrics import peak_flops
from hf_fsdp_recipes.metrics.flops import ModelFlops, TokenCounts, count_flops
from tests.conftest import tiny_config

LENGTHS = [48, 48]
HEAD = 32 * 307
# A layer of the tiny Llama: q and o, k and v with two of four heads, three matrices of the MLP.
LLAMA_LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 52
BY_HAND = {
    "llama": 2 * LLAMA_LAYER + HEAD,
    "llama_tied": 2 * LLAMA_LAYER + HEAD,  # a tied head costs the same
    "gpt2": 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + HEAD,
    "qwen3_moe": 2 * (2 * 32 * 32 + 2 * 32 * 16 + 32 * 5 + 2 * 3 * 32 * 24) + HEAD,  # router; 2 of 5 experts
    "mixtral": 2 * (2 * 32 * 32 + 2 * 32 * 16 + 32 * 4 + 2 * 3 * 32 * 52) + HEAD,  # router; 2 of 4 experts
}


def build(kind, lora=False):
    model = AutoModelForCausalLM.from_config(
        tiny_config(kind), attn_implementation="eager", experts_implementation="eager"
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj"] if "mo" in kind or kind == "mixtral" else "all-linear"
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        model.enable_input_require_grads()  # as with activation checkpointing: the backward pass goes through all layers
    return model.train()


def counted_by_torch(model):
    ids = torch.randint(3, 300, (len(LENGTHS), LENGTHS[0]))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", BY_HAND)
def test_matmul_parameters_equal_counts_by_hand(kind):
    flops = count_flops(build(kind))
    assert flops.matmul_parameters == flops.trainable_parameters == BY_HAND[kind]
    assert flops.head_parameters == HEAD
    assert (flops.attention_width, flops.window_width) == (2 * 4 * (8 + 8), 0)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", BY_HAND)
def test_training_flops_equal_torchs_count(kind, lora):
    model = build(kind, lora)
    assert count_flops(model).training(TokenCounts.of(LENGTHS)) == pytest.approx(counted_by_torch(model), rel=0.02)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe"])
def test_activation_checkpointing_adds_a_forward_pass_to_hardware_flops_only(kind):
    model = build(kind)
    before = count_flops(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert count_flops(model) == before
    assert before.hardware(TokenCounts.of(LENGTHS)) == pytest.approx(counted_by_torch(model), rel=0.02)


def test_llama_2_7b_costs_six_flops_per_parameter_plus_attention():
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    with torch.device("meta"):
        flops = count_flops(AutoModelForCausalLM.from_config(config))
    assert flops.matmul_parameters == 6_738_415_616 - 32000 * 4096 - 65 * 4096  # all but embeddings and norms
    per_token = flops.training(TokenCounts.of([1024])) / 1024
    assert per_token == 6 * flops.matmul_parameters + 12 * 32 * 4096 * 1024


def test_lora_skips_the_gradients_of_frozen_parameters():
    full, lora = count_flops(build("llama")), count_flops(build("llama", lora=True))
    assert lora.trainable_parameters == lora.matmul_parameters - full.matmul_parameters
    work = TokenCounts(tokens=1000, pairs=0, window_pairs=0)
    assert lora.training(work) == 1000 * (4 * full.matmul_parameters + 6 * lora.trainable_parameters)


def test_adapter_of_experts_counts_for_the_experts_of_a_token():
    from peft import LoraConfig, get_peft_model

    targets = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    model = get_peft_model(build("qwen3_moe"), LoraConfig(r=4, **targets))
    sizes = (32 + 2 * 24) + (24 + 32)  # in and out of both products
    assert count_flops(model).trainable_parameters == 2 * 2 * 4 * sizes  # layers, experts per token, LoRA rank


def test_attention_flops_use_sequence_and_window_lengths():
    flops = ModelFlops(0, 0, 0, attention_width=10, window_width=3, window=4)
    work = TokenCounts.of([8, 2], window=4)
    assert work == TokenCounts(10, 68, 8 * 4 + 2 * 2)
    assert flops.forward(work) == 2 * (10 * 68 + 3 * 36)


def test_sliding_window_layers_are_counted_apart_from_full_attention():
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=16, vocab_size=99,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    flops = count_flops(AutoModelForCausalLM.from_config(config))
    assert (flops.attention_width, flops.window_width, flops.window) == (64, 3 * 64, 16)


def test_unsupported_model_raises_with_the_reason():
    with pytest.raises(ValueError, match="Linear has no transformers config"):
        count_flops(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA L4", "float16", 121),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla T4", "float16", 65),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", "bfloat16", 364.2),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("GAUDI2", "bfloat16", 432),
    ],
)
def test_peak_is_found_by_torchs_device_name(name, dtype, tflops):
    assert peak_flops.find_peak_flops(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"),  # MIG slice
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("AMD Instinct MI250X / MI250", "bfloat16"),  # ambiguous
        ("Tesla V100-SXM2-16GB", "bfloat16"),  # no bf16 matrix unit
        ("cpu", "float32"),
        ("Device of the future", "bfloat16"),
    ],
)
def test_device_without_an_exact_match_has_no_peak(name, dtype):
    assert peak_flops.find_peak_flops(name, dtype) is None


def test_one_row_matches_a_name():
    for name in ("h100 nvl", "h200 nvl", "l40s", "a10g", "rtx 3090 ti", "gb200"):
        assert sum(bool(re.fullmatch(names, name)) for names in peak_flops.PEAKS) == 1
    assert all(len(row) == len(peak_flops.DTYPES) and any(row[:2]) for row in peak_flops.PEAKS.values())


@pytest.mark.parametrize(
    ("mixed", "dtype", "precision", "found"),
    [
        ("bf16", torch.float32, "highest", "bfloat16"),
        ("fp8", torch.bfloat16, "highest", "fp8"),
        ("no", torch.float16, "highest", "float16"),
        ("no", torch.float32, "highest", "float32"),
        ("no", torch.float32, "high", "tf32"),
    ],
)
def test_matmul_dtype(mixed, dtype, precision, found):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert peak_flops.matmul_dtype(mixed, torch.nn.Linear(2, 2, dtype=dtype)) == found
    finally:
        torch.set_float32_matmul_precision(before)
