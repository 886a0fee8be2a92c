"""`export_model` on ranks: the files are those that `save_pretrained` writes of the whole model."""

import copy
import ctypes
import functools

import pytest
import torch

from tests.export.cases import TOKENS, assert_same_files, change, load, shard
from tests.ranks.harness import run_ranks

M_MMAP_THRESHOLD = -3  # of mallopt, from malloc.h


def _export(
    directory, folder, held=torch.float32, dtype=None, size="60KB", is_new=False, **sharding
):
    """Export a model, and save the same model with transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.distributed import is_main

    torch.manual_seed(0)
    if is_new:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=held
        ).eval()
    else:
        model = load(directory, held)
        change(model)  # as training does
    if is_main():
        saved = copy.deepcopy(model).to(dtype or held)
        saved.save_pretrained(folder / "stock", max_shard_size=size)
    exported = export_model(
        shard(model, **sharding), folder / "export", dtype=dtype, max_shard_size=size
    )
    if is_main():
        assert torch.allclose(
            load(exported)(TOKENS).logits, saved.float()(TOKENS).logits, atol=1e-2
        )


@pytest.mark.parametrize(
    ("kind", "num_ranks", "options"),
    [
        ("llama", 2, {}),
        ("llama_tied", 3, {"dtype": torch.bfloat16}),
        ("qwen3_moe", 2, {"held": torch.bfloat16}),
        ("qwen3_moe", 4, {"is_hybrid": True}),
        ("gpt_oss", 2, {"size": "5GB"}),
        pytest.param("llama", 2, {"is_offloaded": True}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"is_hybrid": True}, marks=pytest.mark.slow),
        pytest.param("llama", 1, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, {"is_new": True}, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 3, {"dtype": torch.bfloat16}, marks=pytest.mark.slow),
    ],
)
def test_files_are_those_of_save_pretrained_byte_for_byte(
    kind, num_ranks, options, tiny_model, tmp_path
):
    run_ranks(functools.partial(_export, **options), num_ranks, tiny_model(kind), tmp_path)
    assert_same_files(tmp_path / "stock", tmp_path / "export")


def _export_wrapped(directory, folder):
    """Export a model with modules around its layers: activation checkpointing and torch.compile."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from hf_fsdp_recipes import export_model
    from hf_fsdp_recipes.distributed import is_main

    model = load(directory)
    if is_main():
        model.save_pretrained(folder / "stock")
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = torch.compile(checkpoint_wrapper(layer), backend="eager")
    export_model(shard(model, is_offloaded=True), folder / "export")


def test_activation_checkpointing_and_compilation_do_not_change_the_files(tiny_model, tmp_path):
    run_ranks(_export_wrapped, 2, tiny_model("llama_tied"), tmp_path)
    assert_same_files(tmp_path / "stock", tmp_path / "export")


def _export_changed(directory, folder):
    from hf_fsdp_recipes import export_model

    model = load(directory)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    export_model(shard(model), folder / "export")


def test_a_model_with_changed_layers_is_one_error(tiny_model, tmp_path):
    errors = run_ranks(_export_changed, 2, tiny_model("llama"), tmp_path, expect_failure=True)
    assert {kind for kind, _ in errors} == {"ExportError"}
    assert "a model with changed layers cannot be exported" in errors[0][1]
    assert list(tmp_path.iterdir()) == []


def _measure(folder):
    """Export a model of 3 equal layers.

    Return the peak memory above the shard, and the size of the largest parameter.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_fsdp_recipes import export_model
    from tests.ranks.memory import PeakMemory

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # otherwise glibc keeps freed memory
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    model = shard(
        LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_hidden_layers=3, **sizes)),
        is_offloaded=True,
    )
    export_model(model, folder / "export")  # imports what is needed
    with PeakMemory() as memory:
        export_model(model, folder / "export", max_shard_size="300MB")
    largest_bytes = max(parameter.nbytes for parameter in model.parameters())
    return memory.growth_bytes / 1e6, largest_bytes / 1e6


@pytest.mark.slow
def test_a_rank_holds_about_two_parameters_beside_its_shard(tmp_path):
    for growth, parameter in run_ranks(_measure, 2, tmp_path):
        assert growth < 2.1 * parameter
