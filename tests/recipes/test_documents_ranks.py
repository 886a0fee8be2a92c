"""Each of the five documents, run in small: what its page in docs/ shows is what happens."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from hf_fsdp_recipes.metrics.metrics_file import read_metrics
from hf_fsdp_recipes.saving.resume import find_damage
from tests.conftest import SENTENCES
from tests.ranks.harness import printed_by, read_losses, run_ranks
from tests.recipes.launching import ROOT, run_recipe
from tests.recipes.small import environment_of, small_arguments


@pytest.fixture
def train(tmp_path):
    """Return a function that runs a recipe in small.

    It returns the run's directory and what rank 0 printed.
    """

    def run(name, *fields, num_ranks=2, template=None):
        directory = tmp_path / f"{name}-{num_ranks}-{template}"
        directory.mkdir()
        torch.manual_seed(0)  # the same model in each run
        recipe = ROOT / "recipes" / f"{name}.yaml"
        argv = small_arguments(recipe, directory, *fields)
        environment = environment_of(recipe, template)
        printed = run_ranks(
            printed_by, num_ranks, run_recipe, argv, environment=environment, timeout_seconds=200
        )
        return directory / "run", printed[0]

    return run


@pytest.mark.slow
def test_amd_rocm_one_epoch_of_alpaca_its_log_and_the_export_of_a_foreign_checkpoint(
    train, tmp_path
):
    from hf_fsdp_recipes import export_checkpoint
    from hf_fsdp_recipes.tools.generate import complete

    fields = [
        "--max_steps",
        "-1",
        "--num_train_epochs",
        "1",
        "--save_strategy",
        "epoch",
        "--per_device_train_batch_size",
        "4",
    ]
    run, printed = train("llama2_7b_alpaca_full", *fields)
    assert "FSDPLlamaDecoderLayer" in printed
    [log] = run.glob("fsdp_training_*_1_2_1_4.txt")
    assert "loss" in log.read_text() and len(read_losses(run)) == 9  # 72 rows, 2 ranks of 4

    foreign = tmp_path / "fine-tuned-llama"  # as llama-recipes writes it
    shutil.copytree(run / "checkpoint-9" / "pytorch_model_fsdp_0", foreign)
    (foreign / "train_params.yaml").write_text("model_name: llama\n")
    exported = load_file(
        export_checkpoint(foreign, tmp_path / "out", base_model=run.parent / "model")
        / "model.safetensors"
    )
    own = load_file(run / "export" / "model.safetensors")
    assert exported.keys() == own.keys() and all(
        torch.equal(exported[name], own[name]) for name in own
    )
    assert complete(
        run / "export", ["Develop a plan to build an AI chatbot in a home."], max_new_tokens=4
    )


@pytest.mark.slow
def test_distributed_training_guide_offload_has_the_same_losses_and_units_follow_their_size(train):
    offloaded, _ = train("gpt2_alpaca_offload")
    sharded, _ = train("gpt2_alpaca_offload", template="full_shard")
    assert read_losses(offloaded) == read_losses(sharded)
    run, printed = train("llama2_70b_size_wrap")
    # The guide's units for 70B.
    assert "2 x FSDPLlamaAttention" in printed and " x FSDPLinear" in printed
    assert all(
        {"device_peak_bytes", "device_valley_bytes"} <= entry.keys()
        for entry in read_metrics(run / "metrics.jsonl")
        if "loss" in entry
    )


@pytest.mark.slow
def test_multinode_tutorial_every_strategy_trains_the_same_from_a_stream(train):
    stream = [
        "--dataset_streaming",
        "true",
        "--max_length",
        "128",
        "--learning_rate",
        "1e-3",
        "--warmup_steps",
        "1",
    ]
    found = {}
    for template, num_ranks in {
        "ddp": 2,
        "shard_grad_op": 1,
        "full_shard": 2,
        "hybrid_shard_zero2": 4,
    }.items():
        fields = [*stream, "--gradient_accumulation_steps", str(4 // num_ranks)]
        run, _ = train("c4_150m_pretrain", *fields, num_ranks=num_ranks, template=template)
        found[template] = read_losses(run)
    assert len(found["ddp"]) == 6
    for losses in found.values():
        assert losses == pytest.approx(found["ddp"], abs=1e-4)


@pytest.mark.slow
def test_gaudi_lora_evaluates_once_after_the_second_epoch_and_saves_the_adapter_only(
    train, tmp_path
):
    rows = tmp_path / "alpaca.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"instruction": "Go on.", "input": "", "output": s}) + "\n"
            for s in SENTENCES
        )
    )
    epochs = [
        "--max_steps",
        "-1",
        "--num_train_epochs",
        "2",
        "--eval_strategy",
        "epoch",
        "--save_strategy",
        "no",
    ]
    others = [
        "--validation_split_percentage",
        "4",
        "--torch_compile_backend",
        "eager",
        "--dataset_name",
        str(rows),
    ]
    run, printed = train("llama2_70b_lora_gaudi", *epochs, *others)
    assert printed.count("'eval_loss'") == 1 and not list(run.glob("checkpoint-*"))
    assert (run / "export" / "adapter_model.safetensors").is_file()
    steps = [entry for entry in read_metrics(run / "metrics.jsonl") if "loss" in entry]
    assert [entry.get("is_warmup", False) for entry in steps[:4]] == [True, True, True, False]
    assert steps[-1]["learning_rate"] == 4e-4  # constant after its warm-up


@pytest.mark.slow
def test_llama2_70b_trains_formatted_conversations_with_a_paged_optimizer_and_checkpoints_in_shards(
    train,
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = [
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "3",
        "--save_steps",
        "3",
        "--max_steps",
        "6",
    ]
    run, printed = train("llama2_70b_chat_full", *fields)
    assert printed.count("'eval_loss'") == 2
    for step in (3, 6):
        assert find_damage(run / f"checkpoint-{step}") is None
        assert (
            len(list((run / f"checkpoint-{step}" / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
        )
    AutoModelForCausalLM.from_pretrained(run / "export")
    conversation = [{"role": role, "content": role[:1]} for role in ("system", "user", "assistant")]
    text = AutoTokenizer.from_pretrained(run / "export").apply_chat_template(
        conversation, tokenize=False
    )
    assert (
        text
        == "<|system|> s <|endoftext|> <|prompter|> u <|endoftext|> <|assistant|> a <|endoftext|>"
    )
