"""Weights quantized to 4 bits on arrival, compared with the stock QLoRA path on real gloo ranks."""

import pytest

from hf_fsdp_recipes import load_model
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.units import format_bytes
from tests.loading.test_load_model_ranks import HYBRID, _load_only, both
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build, losses_of

NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "float32", "bnb_4bit_compute_dtype": "float32"}


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantizing_in_parts_gives_the_bytes_of_quantizing_at_once(monkeypatch, quant_type, nested):
    import torch
    from bitsandbytes.functional import quantize_4bit

    from hf_fsdp_recipes.loading import bnb_4bit

    monkeypatch.setattr(bnb_4bit, "CPU_CHUNK_ELEMENTS", 1024)
    weight = torch.randn(96, 52, dtype=torch.bfloat16)  # a multiple of neither the chunk size nor the block size
    recipe = bnb_4bit.Quant4bitSpec((96, 52), torch.bfloat16, False, quant_type, nested, torch.bfloat16)
    packed, state = recipe.quantize(weight.clone().view(-1))
    expected, expected_state = quantize_4bit(
        weight, compress_statistics=nested, quant_type=quant_type, quant_storage=torch.bfloat16
    )
    assert torch.equal(packed.view(torch.uint8), expected.view(torch.uint8))
    found, wanted = state.as_dict(packed=True), expected_state.as_dict(packed=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def losses(kind, text_file, tmp_path, tiny_model, environment, world_size=2, **keywords):
    defaults = {"lora": LORA, "dtype": "float32", "quantization": NF4}
    return both(tiny_model(kind, "bfloat16"), text_file, tmp_path, environment, world_size, **(defaults | keywords))


@pytest.mark.parametrize(
    ("kind", "world_size", "quantization"),
    [
        ("llama", 2, NF4),
        pytest.param("llama_tied", 2, NF4 | {"bnb_4bit_use_double_quant": True}, marks=pytest.mark.slow),
        pytest.param("llama", 3, NF4 | {"bnb_4bit_quant_type": "fp4"}, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, NF4, marks=pytest.mark.slow),
        ("qwen3_moe", 1, NF4 | {"llm_int8_skip_modules": ["experts", "lm_head"]}),
    ],
)
def test_fsdp2_losses_equal_stock_qlora(tiny_model, text_file, tmp_path, kind, world_size, quantization):
    environment = fsdp_environment(FSDP2)
    stock, ours = losses(kind, text_file, tmp_path, tiny_model, environment, world_size, quantization=quantization)
    assert ours == stock
    assert len(ours[0]) == 5


def test_fsdp1_losses_equal_stock_qlora(tiny_model, text_file, tmp_path):
    # FSDP1 flattens a unit, so the unit has one dtype: TRL makes adapters of 4-bit models bfloat16.
    storage = {"bnb_4bit_quant_storage": "bfloat16", "bnb_4bit_compute_dtype": "bfloat16"}
    environment = fsdp_environment(FSDP1, precision="bf16")
    keywords = {"dtype": "bfloat16", "bf16": True, "quantization": NF4 | storage}
    stock, ours = losses("llama", text_file, tmp_path, tiny_model, environment, **keywords)
    assert ours == stock


@pytest.mark.slow
def test_hybrid_losses_equal_stock_qlora(tiny_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2, HYBRID)
    stock, ours = losses("llama", text_file, tmp_path, tiny_model, environment, world_size=4)
    assert ours == stock


def _packed_parameters(model_dir, data, output, keywords):
    from hf_fsdp_recipes.parameter_names import in_base_model

    trainer = build(str(model_dir), str(data), str(output), steps=1, **keywords)
    trainer.train()
    layers = {n: m for n, m in trainer.model.named_modules() if type(m).__name__.endswith("Linear4bit")}
    local = {
        in_base_model(n): (str(p.dtype), p.to_local().numel() if hasattr(p, "to_local") else p.numel())
        for n, p in trainer.model.named_parameters()
    }
    assert any(layer.quant_state is not None for layer in layers.values() if hasattr(layer, "quant_state"))
    return local, losses_of(trainer)


def test_integer_storage_is_changed_to_one_that_is_sharded(tiny_model, text_file, tmp_path):
    keywords = {
        "lora": LORA,
        "dtype": "bfloat16",
        "bf16": True,
        "quantization": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
    }
    environment = fsdp_environment(FSDP2, precision="bf16")
    found = run_ranks(
        _packed_parameters, 2, tiny_model("llama", "bfloat16"), text_file, tmp_path, keywords, environment=environment
    )
    for local, _ in found:
        # 32 x 32 weights are 512 packed bytes, or 256 bfloat16 items; each of the two ranks has half of them
        assert local["model.layers.0.self_attn.q_proj.weight"] == ("torch.bfloat16", 128)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["rank0", "direct"])
def test_ranks_that_read_in_turn_get_the_same_weights(tiny_model, text_file, tmp_path, loader):
    keywords = {"lora": LORA, "dtype": "float32", "quantization": NF4, "loader": loader}
    found = run_ranks(
        _packed_parameters,
        4,
        tiny_model("llama", "bfloat16"),
        text_file,
        tmp_path,
        keywords,
        environment=fsdp_environment(FSDP2, HYBRID),
    )
    stock, _ = losses("llama", text_file, tmp_path, tiny_model, fsdp_environment(FSDP2, HYBRID), world_size=4)
    assert found[0][1][0] == stock[0][0]


def test_8_bit_is_refused_by_name(tiny_model):
    errors = run_ranks(_load_8_bit, 2, tiny_model("llama"), environment=fsdp_environment(FSDP2), expect_failure=True)
    assert {name for name, _ in errors} == {"LoadError"}
    assert all("8-bit" in text and "load_in_4bit" in text for _, text in errors)


def _load_8_bit(model_dir):
    from transformers import BitsAndBytesConfig

    from hf_fsdp_recipes import load_model

    load_model(str(model_dir), quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def test_checkpoint_that_is_already_quantized_is_refused_by_name(tiny_model, tmp_path):
    import json
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text(json.dumps(config))
    errors = run_ranks(_load_only, 2, model, {}, environment=fsdp_environment(FSDP2), expect_failure=True)
    assert all("already quantized" in text for _, text in errors)


def _num_parameters(model_dir, dtype):
    from hf_fsdp_recipes.patches import cpu_ranks
    from tests.ranks.training import quantized

    cpu_ranks.enable()
    from hf_fsdp_recipes import load_model

    plain = load_model(str(model_dir), dtype=dtype)
    packed = load_model(str(model_dir), dtype=dtype, **quantized(NF4))
    return plain.num_parameters(), packed.num_parameters(), sum(one.numel() for one in packed.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_counted_as_if_they_were_not_packed(tiny_model, dtype):
    """`verify_export: auto` compares the number of parameters with its limit."""
    environment = fsdp_environment(FSDP2)
    [(num_plain, num_packed, num_elements)] = run_ranks(
        _num_parameters, 1, tiny_model("llama"), dtype, environment=environment
    )
    assert num_packed == num_plain > num_elements


def _error_of_4bit_load(model_dir):
    from tests.ranks.training import quantized

    with pytest.raises(LoadError) as raised:
        load_model(str(model_dir), dtype="bfloat16", **quantized(NF4))
    return str(raised.value)


def test_fused_experts_are_refused_on_all_ranks_unless_they_are_skipped_by_name(tiny_model):
    messages = run_ranks(_error_of_4bit_load, 2, tiny_model("gpt_oss"), environment=fsdp_environment(FSDP2))
    num_bytes = 2 * 3 * (32 * 96 + 48 * 32) * 2  # layers x experts x (sizes of both weights) x bytes of bfloat16
    assert messages[0] == messages[1]
    assert (
        f"such as model.layers.0.mlp.experts.gate_up_proj, would stay in torch.bfloat16 ({format_bytes(num_bytes)} of"
        in messages[0]
    )
    assert 'llm_int8_skip_modules=["experts", "lm_head"]' in messages[0]
