"""The scripts in examples/, run on two CPU ranks with the variables of the launcher, resumed, exported."""

import json
import re
import shutil

import pytest

from tests.ranks.harness import printed_by, run_ranks, template_environment
from tests.recipes.launching import ROOT, run_recipe

CPU_TEMPLATE = ROOT / "accelerate_configs" / "fsdp2_cpu.yaml"
OWN_TRAINER = "examples/own_trainer.py"


def test_own_trainer_resumes_where_it_was_stopped_and_exports_the_same(tiny_model, text_file, tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    whole, output = tmp_path / "whole", tmp_path / "run"
    options = ["--model", tiny_model("llama"), "--data", text_file, "--max_steps", 5, "--save_steps", 2]
    environment = template_environment(CPU_TEMPLATE) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run_ranks(run_recipe, 2, [*options, "--output_dir", whole], OWN_TRAINER, environment=environment)
    shutil.copytree(whole / "checkpoint-2", output / "checkpoint-2")  # all that remains of a run killed after step 2

    arguments = [*options, "--output_dir", output]
    printed = run_ranks(printed_by, 2, run_recipe, arguments, OWN_TRAINER, environment=environment)[0]
    assert len(re.findall(r"\{'loss'", printed)) == 3, printed

    model, info = AutoModelForCausalLM.from_pretrained(output / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    uninterrupted = AutoModelForCausalLM.from_pretrained(whole / "export").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).state_dict()
    assert all(torch.equal(value, uninterrupted[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(output / "export").pad_token == "<|pad|>"


def run_and_resume(script, options, tmp_path, first_step=2):
    """Run a script, then run it from the first checkpoint alone; check that the exports are equal; return both outputs.

    The first checkpoint alone is what remains of a run that is killed right after that checkpoint.
    """
    import torch
    from safetensors.torch import load_file

    runs = {"whole": tmp_path / "whole", "resumed": tmp_path / "run"}
    environment = template_environment(CPU_TEMPLATE) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    printed = []
    for name, output in runs.items():
        if name == "resumed":
            shutil.copytree(runs["whole"] / f"checkpoint-{first_step}", output / f"checkpoint-{first_step}")
        arguments = [*options, "--output_dir", output]
        printed.append(run_ranks(printed_by, 2, run_recipe, arguments, script, environment=environment)[0])
    trained, resumed = (load_file(output / "export" / "model.safetensors") for output in runs.values())
    assert trained.keys() == resumed.keys()
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)
    return printed


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("script", ["own_dpo", pytest.param("own_reward", marks=pytest.mark.slow)])
def test_own_preference_script_resumes_where_it_was_stopped_and_exports_the_same(script, tiny_model, tmp_path):
    rows = [{"prompt": "Count:", "chosen": f" {n}, {n + 1}", "rejected": f" {n}, {n}"} for n in range(24)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    options = ["--model", tiny_model("llama"), "--data", data, "--max_steps", 4, "--save_steps", 2]
    run_and_resume(f"examples/{script}.py", options, tmp_path)
    if script == "own_reward":
        from transformers import AutoModelForSequenceClassification

        export = tmp_path / "run" / "export"
        model, info = AutoModelForSequenceClassification.from_pretrained(export, output_loading_info=True)
        assert model.config.num_labels == 1 and not any(info.values())


@pytest.mark.slow
def test_own_grpo_resumes_where_it_was_stopped_and_exports_the_same(tiny_model, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"Count to {n}:", "answer": "e"} for n in range(24)])
    options = ["--model", tiny_model("llama"), "--data", data, "--max_steps", 4, "--save_steps", 2]
    printed, _ = run_and_resume("examples/own_grpo.py", [*options, "--max_completion_length", 12], tmp_path)
    assert any(float(value) > 0 for value in re.findall(r"'reward_std': '?([\d.e-]+)", printed)), printed


@pytest.mark.slow
def test_own_clm_resumes_where_it_was_stopped_and_exports_the_same(tiny_model, text_file, tmp_path):
    options = ["--model_name_or_path", tiny_model("llama"), "--train_file", text_file, "--validation_file", text_file]
    training = [
        "--max_steps",
        4,
        "--save_steps",
        2,
        "--logging_steps",
        1,
        "--do_train",
        "--do_eval",
        "--report_to",
        "none",
    ]
    printed, resumed = run_and_resume("examples/own_clm.py", [*options, "--block_size", 32, *training], tmp_path)
    assert "perplexity" in printed
    assert re.findall(r"eval_loss +=.*", printed) == re.findall(r"eval_loss +=.*", resumed)
    assert re.findall(r"\{'loss'[^,]*", printed)[2:] == re.findall(r"\{'loss'[^,]*", resumed)


def test_own_loop_resumes_where_it_was_stopped_and_exports_the_same(tiny_model, text_file, tmp_path):
    """The run stops in the second epoch and uses dropout."""
    options = ["--model", tiny_model("gpt2"), "--data", text_file, "--max_steps", 14, "--save_steps", 11]
    printed, resumed = run_and_resume("examples/own_loop.py", options, tmp_path, first_step=11)
    assert printed.splitlines()[-3:] == resumed.splitlines()[-3:]


def test_toy_model_under_fsdp_trains_as_under_ddp_and_each_rank_holds_half():
    found = {}
    for name, options in (("FSDP", []), ("DDP", ["--ddp"])):
        text = run_ranks(printed_by, 2, run_recipe, options, "examples/toy_fsdp.py")[0]
        assert text.startswith(f"{name} on 2 ranks: loss ")
        loss = float(text.split("loss ")[1].splitlines()[0])
        found[name] = loss, [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", text)]
    (loss, sharded), (replicated_loss, replicated) = found["FSDP"], found["DDP"]
    assert abs(loss - replicated_loss) < 1e-6
    assert replicated[:2] == [4 * 4 * 256**2] * 2 and [2 * held for held in sharded[:2]] == replicated[:2]
    assert sharded[2] * 2 < replicated[2] * 1.01


def _reduce_different_shapes():
    import os

    import torch
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # the fork server imported torch without the variable
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1 + int(os.environ["RANK"])))


def test_detail_names_the_ranks_whose_collectives_differ():
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    errors = run_ranks(_reduce_different_shapes, 2, environment=detail, expect_failure=True)
    assert all("Detected mismatch between collectives on ranks" in text for _, text in errors)
