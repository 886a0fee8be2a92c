"""The step benchmark with a tiny model: the GPU cases, and the settings for trl sft."""

import pytest
from safetensors import safe_open

from benchmarks import step


def tiny_case():
    config = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    return step.Case("tiny", config, step.LORA | {"dtype": "float32"}, length=64, steps=8)


@pytest.mark.slow
def test_one_device_is_measured_with_random_weights(tmp_path):
    case = tiny_case()
    found = step.measure_case(case, tmp_path, ["--report", "true"], on_cpu=True)
    assert found["tokens_per_second_per_device"] > 0 and found["model_flops_per_second_per_device"] > 0
    assert found["attention"] == "sdpa" and found["device"] == "cpu" and found["no_mfu"]
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in set(weights.keys())  # tied to the embedding
    lines = "\n".join(step.gpu_lines([found], ""))
    assert "| tiny | 64 | sdpa |" in lines and "12,473 tokens/s" in lines


def test_cases_for_a_gpu_have_the_sizes_that_they_name():
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {}
    for name, case in step.CASES.items():
        with torch.device("meta"):
            sizes[name] = AutoModelForCausalLM.from_config(LlamaConfig(**case.config)).num_parameters()
        assert case.length == 4096
    assert sizes == {"lora_8b": 8_030_261_248, "full_1b": 1_235_814_400}


@pytest.mark.slow
def test_recipe_and_trl_sft_take_the_same_steps(tmp_path):
    from types import SimpleNamespace

    options = SimpleNamespace(parameters=1e5, steps=6, rounds=1)
    results = step.measure_tax(options, tmp_path)
    (ours,), (plain,) = results["recipe"], results["trl sft"]
    assert len(ours["wall"]) == len(plain["wall"]) == options.steps - 4
    assert ours["losses"] == plain["losses"]
    assert min(ours["peak_bytes"], plain["peak_bytes"]) > 10**8
