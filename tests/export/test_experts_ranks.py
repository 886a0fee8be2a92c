"""LoRA on fused experts: trained, saved, resumed, exported and merged as PEFT does it."""

import functools
import re

import pytest
import torch

from tests.checkpointing.test_save_ranks import _digest
from tests.export.test_export_checkpoint_ranks import same_tensors
from tests.export.test_export_model_ranks import whole_state
from tests.ranks.harness import FSDP1, FSDP2, fsdp_environment, run_ranks
from tests.ranks.training import LORA, build, losses_of

EXPERTS = {
    "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"]
}  # fmt: skip


def _train(model, data, output, lora, loader="rank0", checkpoint=None):
    """Train four steps, save every second, and export; return losses and a digest of parameters and optimizer."""
    from hf_fsdp_recipes import ShardedCheckpointCallback, export_model

    saving = {"save_strategy": "steps", "save_steps": 2, "callbacks": [ShardedCheckpointCallback()]}
    trainer = build(
        str(model), str(data), str(output), loader=loader, steps=4, lora=LORA | lora, gradient_checkpointing=True, **saving
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    state = whole_state(trainer)
    for name, merge in (("adapter", False), ("merged", True)):
        export_model(trainer.model, output / name, merge_adapter=merge)
    if trainer.accelerator.is_main_process:
        torch.save(state, output / "state.pt")
    return losses_of(trainer), _digest(trainer)


@pytest.mark.parametrize(
    ("kind", "lora", "num_adapted"),
    [
        ("gpt_oss", EXPERTS, 3),  # experts are stored as (expert, in, out)
        ("qwen3_moe", {}, 7),  # (expert, out, in); PEFT's all-linear includes experts and routers
    ],
)
def test_adapter_of_experts_is_trained_resumed_exported_and_merged_as_pefts_own(
    tiny_model, text_file, tmp_path, kind, lora, num_adapted
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes import export_checkpoint

    run = functools.partial(run_ranks, _train, 2, tiny_model(kind), text_file, environment=fsdp_environment(FSDP2))
    whole = run(tmp_path, lora)
    assert run(tmp_path / "resumed", lora, "rank0", str(tmp_path / "checkpoint-2")) == whole
    assert run(tmp_path / "stock", lora, "stock") == whole

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model(kind)), tmp_path / "adapter")
    reloaded = model.state_dict()
    trained = {name: tensor for name, tensor in torch.load(tmp_path / "state.pt").items() if "lora_" in name}
    assert len(trained) == 2 * 2 * num_adapted
    for name, tensor in trained.items():
        assert torch.equal(reloaded[name], tensor), name
        assert tensor.abs().sum() > 0, name

    export_checkpoint(tmp_path / "checkpoint-4", tmp_path / "offline")
    assert same_tensors(tmp_path / "adapter", tmp_path / "offline")
    export_checkpoint(tmp_path / "checkpoint-4", tmp_path / "offline_merged", merge_adapter=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "later_merged", merge_adapter=True)
    tokens = torch.arange(12)[None]
    logits = model(tokens).logits
    expected = model.merge_and_unload().state_dict()
    for name in ("merged", "offline_merged", "later_merged"):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        found = merged.state_dict()
        assert set(found) == set(expected)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
        torch.testing.assert_close(merged(tokens).logits, logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("fsdp", "lora", "words"),
    [
        (FSDP1, EXPERTS, "adapters of fused experts .* are not supported under FSDP1.* Use an fsdp2"),
        (FSDP2, EXPERTS | {"lora_dropout": 0.1}, r"lora_dropout != 0\). Set lora_dropout: 0"),
        (FSDP2, EXPERTS | {"init_lora_weights": "pissa"}, "and the default init_lora_weights, or adapt only linear"),
    ],
    ids=["FSDP1", "dropout", "PiSSA"],
)
def test_adapter_of_experts_that_cannot_be_trained_is_refused_before_weights_are_read(
    tiny_model, text_file, tmp_path, fsdp, lora, words
):
    start = functools.partial(build, lora=LORA | lora)
    arguments = (str(tiny_model("gpt_oss")), str(text_file), str(tmp_path))
    errors = run_ranks(start, 2, *arguments, environment=fsdp_environment(fsdp), expect_failure=True)
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError" and re.search(words, errors[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_experts_that_are_their_own_unit_train_the_same(tiny_model, text_file, tmp_path, kind):
    by_size = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 3000}
    by_block, by_size = (
        run_ranks(_train, 2, tiny_model(kind), text_file, tmp_path / name, EXPERTS, environment=fsdp_environment(fsdp))
        for name, fsdp in (("block", FSDP2), ("size", FSDP2 | by_size))
    )
    assert by_size == by_block
