"""Packed rows are kept apart, or training is refused.

Sharded optimizers of bitsandbytes train like unsharded ones.
"""

import json
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from transformers import (
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    TrainingArguments,
)

from hf_fsdp_recipes import sharded_optimizer
from tests.conftest import make_tokenizer
from tests.ranks.harness import (
    FSDP2,
    fsdp_environment,
    read_losses,
    run_ranks,
    template_environment,
)
from tests.ranks.training import build, digest, losses_of
from tests.recipes.launching import CPU, LORA, SETTINGS, run_recipe, write_recipe


@pytest.fixture
def opt(tmp_path):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    OPTForCausalLM(
        OPTConfig(**sizes, vocab_size=307, max_position_embeddings=128, tie_word_embeddings=False)
    ).save_pretrained(tmp_path / "opt")
    make_tokenizer(tmp_path / "opt")
    return tmp_path / "opt"


def test_packing_is_refused_where_packed_rows_would_see_each_other(opt, text_file, tmp_path):
    values = SETTINGS | {
        "model_name_or_path": opt,
        "dataset_name": text_file,
        "output_dir": tmp_path / "run",
        "packing": True,
    }
    argv, environment = write_recipe(tmp_path / "recipe.yaml", values), template_environment(CPU)
    errors = run_ranks(_error_of, 2, argv, environment=environment)
    assert errors[0] == errors[1] and "OPTForCausalLM lets packed rows see each other" in errors[0]


def test_a_model_that_sft_trainer_would_train_with_another_loss_is_refused(text_file, tmp_path):
    if Version(version("trl")) < Version("1.16"):
        pytest.skip("older versions of TRL call the model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
    config = ModernBertDecoderConfig(
        vocab_size=307, num_attention_heads=4, sep_token_id=2, **sizes, **special
    )
    ModernBertDecoderForCausalLM(config).save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    values = SETTINGS | {
        "model_name_or_path": tmp_path / "model",
        "dataset_name": text_file,
        "output_dir": tmp_path / "run",
    }
    argv, environment = write_recipe(tmp_path / "recipe.yaml", values), template_environment(CPU)
    errors = run_ranks(_error_of, 2, argv, environment=environment)
    assert errors[0] == errors[1]
    assert "train ModernBertDecoderForCausalLM with another loss than its own" in errors[0]


@pytest.mark.parametrize("is_lora", [False, True])
def test_accumulated_micro_batches_train_like_one_batch_in_bf16(
    is_lora, tiny_model, text_file, tmp_path
):
    """TRL's loss reads the head's weight without a call, so LoRA never gathers this unit.

    torch then fails to accumulate.
    """

    def train(batch, accumulation):
        output = tmp_path / f"run{batch}"
        values = SETTINGS | {
            "model_name_or_path": tiny_model("llama"),
            "dataset_name": text_file,
            "output_dir": output,
            "bf16": True,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "export": False,
        }
        argv = write_recipe(tmp_path / "recipe.yaml", values | (LORA if is_lora else {}))
        run_ranks(run_recipe, 2, argv, environment=fsdp_environment(FSDP2, precision="bf16"))
        return read_losses(output)

    assert train(1, 2) == pytest.approx(train(2, 1), rel=0.01)


def _error_of(argv):
    from hf_fsdp_recipes import distributed, errors

    distributed.exit_with_message = lambda: __import__("contextlib").nullcontext()
    try:
        run_recipe(argv)
    except errors.RecipeError as error:
        return str(error)


def _train(model, data, output, optimizer, resume=False):
    from hf_fsdp_recipes import ShardedCheckpointCallback, latest_checkpoint

    trainer = build(
        str(model),
        str(data),
        str(output),
        callbacks=[ShardedCheckpointCallback()],
        save_strategy="steps",
        save_steps=2,
        steps=4,
        learning_rate=1e-3,
        optim=optimizer,
    )
    trainer.train(resume_from_checkpoint=latest_checkpoint(output) if resume else None)
    return losses_of(trainer), digest(trainer.model)


@pytest.mark.parametrize(
    "optimizer",
    [
        "paged_adamw_32bit",
        pytest.param("lion_32bit", marks=pytest.mark.slow),
        pytest.param("paged_lion_32bit", marks=pytest.mark.slow),
        pytest.param("rmsprop_bnb_32bit", marks=pytest.mark.slow),
        pytest.param("sgd", marks=pytest.mark.slow),
    ],
)
# No path may contain "optimizer": Accelerate 1.13 takes such a checkpoint for the folder of the
# optimizer's state.
def test_bitsandbytes_trains_and_resumes_exactly(optimizer, tiny_model, text_file, tmp_path):
    def train(resume=False):
        arguments = (tiny_model("llama"), text_file, tmp_path / "run", optimizer, resume)
        return run_ranks(_train, 2, *arguments, environment=fsdp_environment(FSDP2))

    whole = train()
    assert whole[0][0][-1] < whole[0][0][0]
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "later")
    assert train(resume=True) == whole
    assert json.loads((tmp_path / "later" / "manifest.json").read_text())["step"] == 4


@pytest.mark.parametrize("is_requested", ["true", "false"])
def test_without_fsdp_trainer_creates_the_optimizer_itself(is_requested, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", is_requested)
    args = TrainingArguments("out", optim="paged_adamw_32bit", use_cpu=True, report_to="none")
    assert (sharded_optimizer(args) is not None) == (is_requested == "true")
