"""FP8 and MXFP4 checkpoints, dequantized into the shards of real gloo ranks, have the values that transformers computes."""

import json

import pytest
import torch

from hf_fsdp_recipes import export_checkpoint
from tests.checkpointing.test_save_ranks import drop_after, train
from tests.export.test_export_checkpoint_ranks import _export_live
from tests.loading import quantized
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA


def _load_and_export(model_dir, output, arguments):
    from accelerate import Accelerator

    from hf_fsdp_recipes import export_model, load_model

    for name, keywords in arguments.items():
        model = load_model(model_dir, **keywords)
        accelerator = Accelerator()
        if accelerator.state.fsdp_plugin.fsdp_version == 1:
            model = accelerator.prepare(model)
        else:
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        export_model(model, output / name)


def load_and_export(model_dir, output, fsdp, **arguments):
    environment = fsdp_environment(fsdp | {"fsdp_auto_wrap_policy": "NO_WRAP"})
    run_ranks(_load_and_export, 2, model_dir, output, arguments, environment=environment)


def assert_loads_as(directory, expected, rtol=0.0, atol=0.0):
    from transformers import AutoModelForCausalLM

    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    found = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_shards_and_export_are_what_transformers_dequantizes(tmp_path, kind):
    model = quantized.make(tmp_path / "model", kind)
    load_and_export(model, tmp_path, FSDP2, rank0={}, direct={"source": "direct"})
    expected = quantized.stock_state(model)
    assert {tensor.dtype for tensor in expected.values() if tensor.dim() > 1} == {torch.bfloat16}
    for source in ("rank0", "direct"):
        assert_loads_as(tmp_path / source, expected)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_fsdp1_and_another_dtype_are_dequantized_alike(tmp_path, kind):
    model = quantized.make(tmp_path / "model", kind)
    load_and_export(model, tmp_path, FSDP1, export={"dtype": "float32", "verify": "full"})
    # transformers leaves unquantized weights in bfloat16
    expected = {name: tensor.float() for name, tensor in quantized.stock_state(model, "float32").items()}
    assert_loads_as(tmp_path / "export", expected)


def test_dtype_is_bfloat16_if_the_config_has_none(tmp_path):
    model = quantized.make(tmp_path / "model", "qwen3")
    expected = quantized.stock_state(model)
    quantized.change_config(model, dtype=None)
    load_and_export(model, tmp_path, FSDP2, export={})
    assert_loads_as(tmp_path / "export", expected)


def test_resumed_run_equals_the_uninterrupted_one(tmp_path, text_file):
    model = quantized.make(tmp_path / "model", "qwen3_moe")
    keywords = {"steps": 4, "save_steps": 2}
    whole = train(model, text_file, tmp_path, **keywords)
    drop_after(tmp_path, 2)
    assert train(model, text_file, tmp_path, resume=True, **keywords) == whole
    export_checkpoint(tmp_path / "checkpoint-4", tmp_path / "export", base_model=model)
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())


def test_adapter_is_merged_into_the_dequantized_model(tmp_path, text_file):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model = quantized.make(tmp_path / "model", "qwen3")
    keywords = {"lora": LORA, "dtype": "bfloat16"}
    run_ranks(_export_live, 2, model, text_file, tmp_path, keywords, environment=fsdp_environment(FSDP2))
    export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "offline_merged", merge_adapter=True)
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=FineGrainedFP8Config(dequantize=True))
    expected = PeftModel.from_pretrained(base, tmp_path / "live").merge_and_unload().state_dict()
    for export in ("live_merged", "offline_merged"):
        assert_loads_as(tmp_path / export, expected, rtol=2**-7, atol=2**-12)  # one rounding to bfloat16


def _load_only(model_dir, arguments):
    import transformers

    from hf_fsdp_recipes import load_model

    arguments = {key: getattr(transformers, name)(**fields) for key, (name, fields) in arguments.items()}
    return type(load_model(model_dir, **arguments)).__name__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quantization_config": ("BitsAndBytesConfig", {"load_in_4bit": True})}, "cannot be quantized with load_in_4bit"),
        ({"quantization_config": ("Mxfp4Config", {})}, "cannot be quantized with"),
    ],
)  # fmt: skip
def test_quantizing_again_is_refused_on_every_rank(tmp_path, arguments, words):
    model, environment = quantized.make(tmp_path / "model", "qwen3"), fsdp_environment(FSDP2)
    errors = run_ranks(_load_only, 2, model, arguments, environment=environment, expect_failure=True)
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError" and words in errors[0][1]


def test_argument_with_which_transformers_dequantizes_is_accepted(tmp_path):
    model = quantized.make(tmp_path / "model", "gpt_oss")
    arguments = {"quantization_config": ("Mxfp4Config", {"dequantize": True})}
    assert run_ranks(_load_only, 1, model, arguments, environment=fsdp_environment(FSDP2)) == ["GptOssForCausalLM"]
