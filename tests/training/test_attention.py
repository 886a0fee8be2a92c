"""The attention setting, and the check for leaks between packed documents."""

import pytest

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training import attention
from tests.conftest import tiny_config


def test_auto_on_cpus_uses_the_default_of_the_model():
    assert attention.select_implementation("auto", is_on_cpu=True) is None
    assert attention.select_implementation("flex", is_on_cpu=True) == "flex_attention"


def test_auto_uses_flash_if_it_is_installed(monkeypatch):
    monkeypatch.setattr(attention, "find_flash", lambda: "flash_attention_2")
    assert attention.select_implementation("auto", is_on_cpu=False) == "flash_attention_2"
    assert attention.select_implementation("sdpa", is_on_cpu=False) == "sdpa"


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


def test_missing_mask_is_detected():
    # If position_ids do not restart, the second document attends to the first.
    import torch

    config = tiny_config("llama")
    restarted = torch.Tensor.repeat
    try:
        torch.Tensor.repeat = lambda self, times: torch.arange(self.numel() * times)
        assert attention.measure_leak(config, "sdpa") > attention.LEAK_TOLERANCE
    finally:
        torch.Tensor.repeat = restarted
