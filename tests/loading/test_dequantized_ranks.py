"""FP8 and MXFP4 checkpoints are dequantized while they load, to the values transformers reads."""

import pytest
import torch

from tests.loading import quantized
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks


def _load(directory, source):
    from accelerate import Accelerator

    from hf_fsdp_recipes import export_model, load_model

    model = load_model(str(directory), source=source)
    model, _ = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    export_model(model, directory / "export")
    full = {
        name: v.full_tensor() if hasattr(v, "full_tensor") else v
        for name, v in model.state_dict().items()
    }
    return {name: (value.dtype, value.float().numpy()) for name, value in full.items()}


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("qwen3", "rank0"),
        ("gpt_oss", "direct"),
        pytest.param("qwen3_moe", "rank0", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "rank0", marks=pytest.mark.slow),
        pytest.param("mistral", "rank0", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "rank0", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "direct", marks=pytest.mark.slow),
    ],
)
def test_quantized_checkpoints_have_transformers_dequantized_values(kind, source, tmp_path):
    from transformers import AutoModelForCausalLM

    directory = quantized.make(tmp_path / "model", kind)
    expected = quantized.stock_state(directory)
    for found in run_ranks(_load, 2, directory, source, environment=fsdp_environment(FSDP2)):
        assert found.keys() == expected.keys()
        assert [name for name, value in expected.items() if found[name][0] != value.dtype] == []
        assert [
            name
            for name, value in expected.items()
            if (found[name][1] != value.float().numpy()).any()
        ] == []
    exported = AutoModelForCausalLM.from_pretrained(directory / "export")
    assert getattr(exported.config, "quantization_config", None) is None
    assert all(torch.equal(value, expected[name]) for name, value in exported.state_dict().items())
