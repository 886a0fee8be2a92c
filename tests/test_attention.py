"""The attention switch, and who leaks between packed documents."""

import pytest

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training import attention
from tests.conftest import tiny_config


def test_auto_on_cpus_leaves_the_choice_to_the_model():
    assert attention.choose("auto", is_on_cpu=True) is None
    assert attention.choose("flex", is_on_cpu=True) == "flex_attention"


def test_auto_takes_flash_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(attention, "find_flash", lambda: "flash_attention_2")
    assert attention.choose("auto", is_on_cpu=False) == "flash_attention_2"
    assert attention.choose("sdpa", is_on_cpu=False) == "sdpa"


def test_flash_without_flash_is_refused():
    with pytest.raises(RecipeError, match="CPUs"):
        attention.choose("flash", is_on_cpu=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(kind, implementation):
    attention.check_packing(tiny_config(kind), implementation)


def test_a_model_that_leaks_is_refused():
    from transformers import OPTConfig

    with pytest.raises(RecipeError, match="packing with sdpa attention leaks in opt models"):
        attention.check_packing(OPTConfig(), "sdpa")


def test_the_probe_sees_a_leak_where_there_is_no_mask_at_all():
    # Without position_ids that start anew, the second document attends to the first: the probe's own control.
    import torch

    config = tiny_config("llama")
    restarted = torch.Tensor.repeat
    try:
        torch.Tensor.repeat = lambda self, times: torch.arange(self.numel() * times)
        assert attention.measure_leak(config, "sdpa") > attention.LEAK_TOLERANCE
    finally:
        torch.Tensor.repeat = restarted
