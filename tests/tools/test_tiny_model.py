"""Tiny models: configs of many classes, made small, so that a model of them trains on text."""

import pytest
import torch
import transformers

from hf_fsdp_recipes.loading.load_model import find_class
from hf_fsdp_recipes.tools.tiny_model import shrink

NUM_TOKENS = 300
# A class, and fields of its config that the checkpoints set but the config's class does not.
MROPE = {"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}}
CLASSES = {
    "LlamaForCausalLM": {},
    "GPT2LMHeadModel": {},
    "GPTJForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "Gemma3ForConditionalGeneration": {},
    "LlavaForConditionalGeneration": {},
    "Mistral3ForConditionalGeneration": {},
    "Qwen2_5_VLForConditionalGeneration": MROPE,
    "Qwen3VLForConditionalGeneration": {},
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_tiny_model_learns_from_text_in_the_class_that_its_config_names(name):
    model_class = getattr(transformers, name)
    config = model_class.config_class(**CLASSES[name], architectures=[name])
    assert find_class(config.architectures) is model_class
    model = find_class(config.architectures)(shrink(config, NUM_TOKENS))
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    assert config.get_text_config().num_hidden_layers > 2  # the real config is as it was
    tokens = torch.arange(2, 50).view(2, 24)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert model.get_input_embeddings().weight.grad.any()
    assert len(model.get_input_embeddings().weight) == NUM_TOKENS


def test_a_config_that_names_no_class_is_of_a_causal_model():
    assert find_class(transformers.LlamaConfig().architectures) is transformers.AutoModelForCausalLM


def test_a_tiny_model_has_no_dropout_and_different_kinds_of_layers():
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=4, layer_types=kinds, attention_dropout=0.1
    )
    tiny = shrink(config, NUM_TOKENS)
    assert tiny.attention_dropout == 0
    assert set(tiny.layer_types) == set(kinds) and len(tiny.layer_types) == 2
