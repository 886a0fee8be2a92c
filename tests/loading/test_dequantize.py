"""Any dequantized range of a weight equals transformers' result; weights that cannot be dequantized are refused by name."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import LoadError
from hf_fsdp_recipes.loading.build_on_meta import read_config
from hf_fsdp_recipes.loading.dequantize import describe_dequantized, take_quantization
from hf_fsdp_recipes.loading.read_ranges import as_bytes
from hf_fsdp_recipes.loading.safetensors_index import open_index
from tests.loading import quantized


def read_whole_and_in_ranges(directory, tensors, quantization, dtype):
    """Yield a weight three times: read in one range, in ranges of 7 elements, and in ranges of 41 elements."""
    from transformers import LlamaConfig

    save_file(tensors, directory / "model.safetensors")
    index = open_index(directory)
    taken = take_quantization(LlamaConfig(quantization_config=quantization), "model")
    index.tensors = describe_dequantized(index.tensors, taken, dtype)
    [stored] = index.tensors.values()
    for step in (math.prod(stored.shape), 7, 41):
        parts = torch.empty(math.prod(stored.shape), dtype=dtype)
        for start in range(0, len(parts), step):
            index.read_into(as_bytes(parts[start : start + step]), stored, start * dtype.itemsize)
        yield parts.view(stored.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(32, 48), (3, 32, 16)])
def test_any_range_of_fp8_is_what_transformers_dequantizes(tmp_path, shape, scale_dtype, dtype):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], shape[-2] // 16, shape[-1] // 16).to(scale_dtype)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
    tensors = {"proj": weight, "proj_scale_inv": scales}
    for found in read_whole_and_in_ranges(tmp_path, tensors, quantized.FP8, dtype):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(52, 24), (40, 16), (3, 40, 24)])
def test_blocks_at_the_edges_may_be_smaller(tmp_path, shape):
    """transformers 5.23 refuses such weights or divides them into equal blocks; padded with zeros, it reads them correctly."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    rows, columns = shape[-2:]
    scales = torch.rand(*shape[:-2], -(-rows // 16), -(-columns // 16))
    filled = torch.nn.functional.pad(weight.float(), (0, -columns % 16, 0, -rows % 16)).to(weight.dtype)
    expected = Fp8Dequantize(None)._dequantize_one(filled, scales, torch.bfloat16)[..., :rows, :columns]
    tensors = {"proj.weight": weight, "proj.weight_scale_inv": scales}
    for found in read_whole_and_in_ranges(tmp_path, tensors, quantized.FP8, torch.bfloat16):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_range_of_mxfp4_is_what_transformers_dequantizes(tmp_path, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    tensors = quantized.mxfp4("experts.down_proj", torch.Size((3, 64, 5)))
    expected = convert_moe_packed_tensors(*tensors.values(), dtype=dtype)
    assert expected.shape == (3, 64, 5)
    for found in read_whole_and_in_ranges(tmp_path, tensors, quantized.MXFP4, dtype):
        assert torch.equal(found, expected)


def weights(shape=(32, 32), scales=(2, 2), dtype=torch.float8_e4m3fn, scale_dtype=torch.float32, suffix="_scale_inv"):
    return {"q.weight": torch.zeros(shape).to(dtype), f"q.weight{suffix}": torch.ones(scales).to(scale_dtype)}


@pytest.mark.parametrize(
    ("tensors", "quantization", "words"),
    [
        (weights(scales=(1, 2)), quantized.FP8, r"shape \[32, 32\], with scales in torch.float32 of shape \[1, 2\]"),
        (weights(scales=()), quantized.FP8, "does not fit"),
        (weights(dtype=torch.int8), quantized.FP8, "q.weight is torch.int8"),
        (weights(scale_dtype=torch.uint8), quantized.FP8, "scales in torch.uint8"),
        (weights(), None, "does not fit the quantization_config in the model's config.json .None"),
        (weights(suffix="_scale"), quantized.FP8, "the checkpoint has no q.weight_scale_inv"),
        (weights(shape=(32,), scales=(1,)), quantized.FP8, "without scales that can be read"),
        ({"w_blocks": torch.zeros(2, 4, 1, 8).byte(), "w_scales": torch.zeros(2, 4, 1).byte()}, quantized.MXFP4, "w_blocks"),
    ],
)  # fmt: skip
def test_weights_that_the_config_does_not_describe_are_refused(tmp_path, tensors, quantization, words):
    with pytest.raises(LoadError, match=words):
        next(read_whole_and_in_ranges(tmp_path, tensors, quantization, torch.bfloat16))


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "mxfp8"),
        ({"load_in_4bit": True}, "{'load_in_4bit'"),
    ],
)
@pytest.mark.parametrize("part", ["config", "text part"])
def test_other_methods_are_refused_by_name(quantization, method, part):
    from transformers import LlamaConfig, LlavaConfig

    config = LlavaConfig()
    (config if part == "config" else config.text_config).quantization_config = quantization
    with pytest.raises(
        LoadError, match=f"the quant_method in its config is {method}.*fp8 and mxfp4.*unquantized model"
    ):
        take_quantization(config, "model")
    assert take_quantization(LlamaConfig(), "model") is None


@pytest.mark.parametrize("block", [[0, 128], [128], 128])
def test_block_size_that_is_none_is_refused(tmp_path, block):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    quantized.change_config(tmp_path, quantization_config=quantized.FP8 | {"weight_block_size": block})
    with pytest.raises(LoadError, match=r"weight_block_size must be|has no len"):
        read_config(str(tmp_path))


def test_plan_is_that_of_the_dequantized_model(tmp_path):
    from typer.testing import CliRunner

    def plan(*options):
        return CliRunner().invoke(app, ["plan", "--model", str(directory / "config.json"), "--json", *options])

    directory = quantized.make(tmp_path / "model", "qwen3")
    found = plan()
    assert not hasattr(read_config(str(directory)), "quantization_config")
    again = plan("--quantized", "4bit", "--lora", "8")
    quantized.change_config(directory, quantization_config=None)
    assert json.loads(found.stdout) == json.loads(plan().stdout)
    assert "already quantized (fp8)" in str(again.exception)
    quantized.change_config(directory, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "is gptq" in str(plan().exception)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_without_fsdp_the_model_is_dequantized_too(tmp_path, monkeypatch, kind):
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import load_model

    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.torch.cuda.is_available", lambda: True)
    directory = quantized.make(tmp_path / "model", kind)
    model = load_model(directory)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "saved")  # a model that transformers had loaded would be quantized again
    monkeypatch.undo()
    expected, saved = quantized.stock_state(directory), AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for state in (model.state_dict(), saved.state_dict()):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
