"""The attention setting, and the check for leaks between packed documents."""

from types import SimpleNamespace

import pytest
import torch

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training import attention
from tests.conftest import tiny_config

# Without the package, transformers 5.18 lets documents affect each other; later versions raise an error.
NEEDS_PACKAGE = (
    "Install `causal_conv1d` to train on packed sequences. Use packing: false|packing leaks between documents"
)


def test_auto_on_cpus_uses_the_default_of_the_model():
    assert attention.select_implementation("auto", is_on_cpu=True) is None
    assert attention.select_implementation("flex", is_on_cpu=True) == "flex_attention"


def test_auto_uses_flash_if_it_is_installed(monkeypatch):
    monkeypatch.setattr(attention, "find_flash", lambda downloads: "flash_attention_2")
    assert attention.select_implementation("auto", is_on_cpu=False) == "flash_attention_2"
    assert attention.select_implementation("sdpa", is_on_cpu=False) == "sdpa"


@pytest.mark.parametrize(
    ("generation", "installed", "downloads", "expected"),
    [
        (9, {2, 3}, False, "flash_attention_3"),
        (9, {2}, False, "flash_attention_2"),
        (8, {2, 3}, False, "flash_attention_2"),
        (8, {"kernels"}, True, "flash_attention_2"),
        (8, {"kernels"}, False, None),
        (7, {"kernels"}, True, None),  # the device is too old for the Hub's kernels
        (9, set(), True, None),
    ],
)
def test_newest_flash_for_the_device_is_found(monkeypatch, generation, installed, downloads, expected):
    """`installed` holds versions of flash-attn; "kernels" means that the kernels package can download version 2."""
    module = SimpleNamespace(get_device_capability=lambda: (generation, 0))
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.get_device_module", lambda device: module)
    monkeypatch.setattr("transformers.utils.is_flash_attn_3_available", lambda: 3 in installed)
    monkeypatch.setattr(
        "transformers.utils.is_flash_attn_2_available",
        lambda kernels_fallback_ok: 2 in installed or (kernels_fallback_ok and "kernels" in installed),
    )
    assert attention.find_flash(downloads) == expected


@pytest.mark.parametrize(
    ("device", "generation", "has_triton", "has_flex", "dropout", "expected"),
    [
        ("cuda", 8, True, True, 0.0, "flex_attention"),
        ("cuda", 7, True, True, 0.0, "sdpa"),
        ("cuda", 8, False, True, 0.0, "sdpa"),
        ("hpu", 8, True, True, 0.0, "sdpa"),
        ("cuda", 8, True, False, 0.0, "sdpa"),
        ("cuda", 8, True, True, 0.1, "sdpa"),
    ],
)
def test_packed_documents_use_flex_instead_of_a_dense_mask(
    monkeypatch, device, generation, has_triton, has_flex, dropout, expected
):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="sdpa")
    model._supports_flex_attn = has_flex
    model.config.attention_dropout = dropout
    module = SimpleNamespace(get_device_capability=lambda: (generation, 0))
    with monkeypatch.context() as patch:
        patch.setattr("torch.accelerator.current_accelerator", lambda: torch.device(device))
        patch.setattr("torch.get_device_module", lambda device: module)
        patch.setattr(attention, "find_spec", lambda name: object() if has_triton else None)
        attention.avoid_dense_mask(model)
    assert model.config._attn_implementation == expected
    attention.check_packing(model.config, expected)


@pytest.mark.parametrize(
    ("installed", "dtype", "is_reachable", "compatible", "expected"),
    [
        ("flash_attention_2", torch.bfloat16, True, None, "flash_attention_2"),
        ("flash_attention_2", torch.bfloat16, False, None, "flex_attention"),
        (
            "flash_attention_2",
            torch.bfloat16,
            True,
            ["other/kernel"],
            "flex_attention",
        ),  # another kernel may be for inference only
        ("flash_attention_2", torch.float32, True, None, "flex_attention"),  # FlashAttention computes in 16 bits only
        (None, torch.bfloat16, True, None, "flex_attention"),
    ],
)
def test_packed_documents_use_flash_from_the_hub_before_flex(
    monkeypatch, installed, dtype, is_reachable, compatible, expected
):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="sdpa", dtype=dtype)

    def set_implementation(name):
        if name.startswith("flash") and not is_reachable:
            raise ValueError("An error occurred while trying to load from 'kernels-community/flash-attn2'")
        model.config._attn_implementation = name

    model.set_attn_implementation, model._compatible_flash_implementations = set_implementation, compatible
    module = SimpleNamespace(get_device_capability=lambda: (8, 0))
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.get_device_module", lambda device: module)
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    monkeypatch.setattr(attention, "find_flash", lambda downloads: installed if downloads else None)
    attention.avoid_dense_mask(model)
    assert model.config._attn_implementation == expected


def test_flash_without_flash_is_refused():
    with pytest.raises(RecipeError, match="CPUs"):
        attention.select_implementation("flash", is_on_cpu=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_documents_do_not_attend_to_each_other(kind, implementation):
    attention.check_packing(tiny_config(kind), implementation)


def test_a_model_that_leaks_is_refused():
    from transformers import OPTConfig

    with pytest.raises(RecipeError, match="packing leaks between documents in opt models with sdpa attention"):
        attention.check_packing(OPTConfig(), "sdpa")


@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2", "kernels-community/flash-attn2"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("jamba", "packing leaks between documents in jamba models"),  # jamba's state passes from document to document
        ("minimax", "packing leaks between documents in minimax models"),
        ("qwen3_next", NEEDS_PACKAGE),
        ("bamba", NEEDS_PACKAGE),
    ],
)
def test_linear_attention_is_tested_with_any_attention(kind, message, implementation):
    from transformers import AutoConfig

    with pytest.raises(RecipeError, match=message) as caught:
        attention.check_packing(AutoConfig.for_model(kind), implementation)
    assert "attention: flash" not in str(caught.value)  # flash would not help, so it is not suggested


def test_state_space_models_are_refused():
    from transformers import Mamba2Config

    with pytest.raises(RecipeError, match="packing leaks between documents in mamba2 models with eager attention"):
        attention.check_packing(Mamba2Config(), "eager")


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_vision_models_that_ignore_text_positions_need_flash(name):
    import transformers

    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        rope_scaling=rope, architectures=[f"{name}ForConditionalGeneration"], vision_config=vision
    )
    with pytest.raises(
        RecipeError, match=rf"in {config.model_type} models with sdpa.* Use attention: flash, packing: false"
    ):
        attention.check_packing(config, "sdpa")
    attention.check_packing(config, "flash_attention_2")  # the trainer passes the documents' lengths


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "mixtral"])
def test_flash_attention_gets_the_documents(kind):
    attention.check_packing(tiny_config(kind), "flash_attention_2")


@pytest.mark.parametrize("implementation", ["sdpa", attention.EMULATED_FLASH])
def test_missing_mask_is_detected(monkeypatch, implementation):
    from trl.trainer import sft_trainer

    def collate(self, rows):  # without lengths, the second document attends to the first
        tokens = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(tokens.shape[1])[None]}

    monkeypatch.setattr(sft_trainer.DataCollatorForLanguageModeling, "__call__", collate)
    assert attention.measure_leak(tiny_config("llama"), implementation) > attention.LEAK_TOLERANCE
