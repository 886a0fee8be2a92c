"""Adapters on ranks: written as PEFT writes them, and merged as `merge_and_unload` merges them."""

import copy
import functools
import re

import pytest
import torch

from tests.export.cases import (
    TOKENS,
    adapt,
    assert_same_files,
    assert_same_tensors,
    change,
    load,
    merge,
    shard,
)
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build

NF4 = {"bnb_4bit_quant_storage": "float32", "bnb_4bit_compute_dtype": "float32"}

LINEAR = {"target_modules": "all-linear"}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
F32, BF16 = torch.float32, torch.bfloat16
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def _export(directory, folder, lora, held=F32):
    """Export an adapter, alone and merged, and let PEFT write the same."""
    from peft import PeftModel

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.distributed import is_main

    model = adapt(load(directory, held), **lora)
    if is_main():
        copy.deepcopy(model).save_pretrained(folder / "stock")
        merged = merge(model, held)
        merged.save_pretrained(folder / "stock_merged", max_shard_size="60KB")
    shard(model)
    export_model(model, folder / "export")
    exported = export_model(
        model, folder / "export_merged", merge_adapter=True, max_shard_size="60KB"
    )
    if is_main():
        for loaded in (
            load(exported),
            PeftModel.from_pretrained(load(directory), folder / "export"),
        ):
            assert torch.allclose(loaded(TOKENS).logits, merged.float()(TOKENS).logits, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "lora", "held"),
    [
        ("llama", LINEAR, F32),
        ("llama_tied", LINEAR | {"use_rslora": True, "rank_pattern": {"q_proj": 8}}, BF16),
        ("llama", LINEAR | {"modules_to_save": ["lm_head", "embed_tokens"]}, F32),
        ("qwen3_moe", {"target_modules": ["q_proj"]} | EXPERTS, F32),
        slow("qwen3_moe", EXPERTS, BF16),
        slow("llama", {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}, F32),
        slow("llama", LINEAR | {"bias": "all"}, F32),
        slow("llama", LINEAR | {"use_dora": True}, F32),
        slow("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}, F32),
        slow("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}, F32),
    ],
)
def test_adapters_are_written_and_merged_as_by_peft(kind, lora, held, tiny_model, tmp_path):
    run_ranks(_export, 2, tiny_model(kind), tmp_path, lora, held)
    assert_same_files(tmp_path / "stock", tmp_path / "export")
    assert_same_files(tmp_path / "stock_merged", tmp_path / "export_merged")


def _export_tied(directory, folder):
    from hf_fsdp_recipes import export_model

    model = shard(adapt(load(directory), target_modules=["embed_tokens"]))
    export_model(model, folder / "export", merge_adapter=True)


def test_an_adapted_embedding_that_is_tied_is_not_merged(tiny_model, tmp_path):
    errors = run_ranks(_export_tied, 2, tiny_model("llama_tied"), tmp_path, expect_failure=True)
    assert {kind for kind, _ in errors} == {"ExportError"}
    assert "are tied, and the adapter changes one" in errors[0][1]
    assert list(tmp_path.iterdir()) == []


def _export_one_of_two(directory, folder):
    """Train two adapters, and export one of them. Before that, both are active."""
    from peft import LoraConfig

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.distributed import is_main
    from hf_fsdp_recipes.errors import ExportError

    model = adapt(load(directory), target_modules=["q_proj"])
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    change(model, "lora_")
    if is_main():
        model.save_pretrained(folder / "stock", selected_adapters=["default"])
        alone = copy.deepcopy(model)
        alone.delete_adapter("second")
        merge(alone).save_pretrained(folder / "stock_merged")
    shard(model)
    for active in (["default", "second"], ["second"]):
        model.base_model.set_adapter(active)
        for merge_adapter in (False, True):
            with pytest.raises(ExportError, match=re.escape(f"adapters {active} are active")):
                export_model(model, folder / "export", merge_adapter=merge_adapter)
    model.set_adapter("default")
    export_model(model, folder / "export")
    export_model(model, folder / "export_merged", merge_adapter=True)


def test_only_one_active_adapter_is_exported(tiny_model, tmp_path):
    run_ranks(_export_one_of_two, 2, tiny_model(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "stock",
        "stock_merged",
        "export",
        "export_merged",
    }
    assert_same_files(tmp_path / "stock", tmp_path / "export")
    assert_same_files(tmp_path / "stock_merged", tmp_path / "export_merged")


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("OFTConfig", {"target_modules": ["q_proj"]}, "export it alone, and merge it with PEFT"),
        ("BOFTConfig", {"target_modules": ["q_proj"]}, "PEFT needs the model's values"),
        ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 1}, "PEFT cannot merge"),
    ],
)
def test_an_adapter_that_is_not_merged_is_exported_alone(
    kind, options, error, tiny_model, tmp_path
):
    """OFT has values that are not saved, BOFT computes with values, and nothing merges prompts."""
    import peft

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(load(tiny_model("llama")), config)
    with pytest.raises(ExportError, match=error):
        export_model(model, tmp_path / "export", merge_adapter=True)
    assert list(tmp_path.iterdir()) == []
    model.save_pretrained(tmp_path / "stock")
    assert_same_tensors(tmp_path / "stock", export_model(model, tmp_path / "export"))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PromptTuningConfig", {"num_virtual_tokens": 4}),
        ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
        ("AdaLoraConfig", {"target_modules": ["q_proj"], "total_step": 10}),
    ],
)
def test_an_adapter_that_peft_computes_when_it_saves_is_refused(
    kind, options, tiny_model, tmp_path
):
    import peft

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(load(tiny_model("llama")), config)
    for merge_adapter in (False, True):
        with pytest.raises(ExportError, match="train without FSDP"):
            export_model(model, tmp_path / "export", merge_adapter=merge_adapter)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_of_a_resized_model_is_not_merged_into_the_files(tiny_model, tmp_path):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    model = load(tiny_model("llama"))
    model.resize_token_embeddings(model.config.vocab_size + 8)
    resized = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    adapt(model, **resized).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ExportError, match="does not fit"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "export", merge_adapter=True)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("merge_adapter", [False, True])
def test_a_weight_that_is_trained_but_in_no_adapter_is_refused(merge_adapter, tiny_model, tmp_path):
    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    model = adapt(load(tiny_model("llama")), target_modules=["q_proj"])
    model.base_model.model.model.norm.requires_grad_(True)
    with pytest.raises(ExportError, match=r"norm.weight.*Name their modules in modules_to_save"):
        export_model(model, tmp_path / "export", merge_adapter=merge_adapter)
    assert list(tmp_path.iterdir()) == []


def _merge_in_place(model):
    model.merge_adapter()


@pytest.mark.parametrize(
    ("lora", "prepare", "error"),
    [
        ({}, _merge_in_place, "is merged already"),
        ({"layer_replication": [[0, 2], [1, 2]]}, None, "layer_replication cannot be merged here"),
    ],
)
def test_a_merge_that_would_be_wrong_is_refused(lora, prepare, error, tiny_model, tmp_path):
    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    model = adapt(load(tiny_model("llama")), target_modules=["q_proj"], **lora)
    if prepare:
        prepare(model)
    with pytest.raises(ExportError, match=error):
        export_model(model, tmp_path / "export", merge_adapter=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_trained_biases_are_merged_into_files(kind, tiny_model, tmp_path):
    from hf_fsdp_recipes import export_checkpoint

    target = {"llama": "q_proj", "gpt2": "c_attn"}[kind]
    model = adapt(load(tiny_model(kind)), target_modules=[target], bias="all")
    change(model, "bias")
    model.save_pretrained(tmp_path / "adapter")
    merged = export_checkpoint(tmp_path / "adapter", tmp_path / "merged", merge_adapter=True)
    merge(model).save_pretrained(tmp_path / "stock")
    assert_same_tensors(tmp_path / "stock", merged)


def test_a_trained_head_that_is_tied_is_not_merged_into_files(tiny_model, tmp_path):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.errors import ExportError

    model = load(tiny_model("llama_tied"))
    model = adapt(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ExportError, match="are tied, and the adapter changes one"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "merged", merge_adapter=True)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "float33"])
def test_a_dtype_that_transformers_does_not_load_is_refused(dtype, tiny_model, tmp_path):
    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.errors import ExportError

    with pytest.raises(ExportError, match=f"'{dtype}' cannot be exported. Use float32"):
        export_model(load(tiny_model("llama")), tmp_path / "export", dtype=dtype)


def _export_zero_rows(directory, folder):
    """Export an adapter of which a whole row of lora_A, and all of lora_B, are zero.

    They may be so after training.
    """
    from hf_fsdp_recipes import export_model

    model = adapt(load(directory), target_modules=["q_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter[: 1 if "lora_A" in name else None] = 0
    shard(model)
    export_model(model, folder / "export")
    export_model(model, folder / "export_merged", merge_adapter=True)


def test_zero_rows_of_an_adapter_are_exported(tiny_model, tmp_path):
    run_ranks(_export_zero_rows, 2, tiny_model("llama"), tmp_path)
    assert_same_tensors(tiny_model("llama"), tmp_path / "export_merged")


def _export_4bit(directory, data, folder, bias):
    """Train an adapter on a 4-bit model. Export it alone, and merged into the base's files."""
    from hf_fsdp_recipes import export_model

    lora = LORA | {"bias": bias}
    trainer = build(
        str(directory), str(data), str(folder / "run"), lora=lora, quantization=NF4, steps=2
    )
    trainer.train()
    export_model(trainer.model, folder / "export")
    export_model(trainer.model, folder / "export_merged", merge_adapter=True)


@pytest.mark.parametrize("bias", ["none", "all"])
def test_an_adapter_of_a_4bit_model_is_merged_into_the_unquantized_base(
    bias, tiny_model, text_file, tmp_path
):
    from peft import PeftModel

    base = tiny_model("llama_wide", "bfloat16")
    inputs = (base, text_file, tmp_path, bias)
    run_ranks(_export_4bit, 2, *inputs, environment=fsdp_environment(FSDP2))
    adapted = PeftModel.from_pretrained(load(base, BF16), tmp_path / "export")
    merge(adapted, BF16).save_pretrained(tmp_path / "stock")
    assert_same_tensors(tmp_path / "stock", tmp_path / "export_merged")
    assert "quantization_config" not in (tmp_path / "export_merged" / "config.json").read_text()
