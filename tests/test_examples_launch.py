"""The scripts in examples/ on two CPU ranks: trained, resumed as after a kill, exported."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks.harness import printed_by, run_ranks, template_environment
from tests.recipes.launching import CPU, run_recipe

PAIRS = [
    {"prompt": "Count:", "chosen": f" {n}, {n + 1}", "rejected": f" {n}, {n}"} for n in range(24)
]
RATED = [
    {"prompt": "Count:", "completion": f" {n}, {n + 1}", "label": n % 2 == 0} for n in range(24)
]
QUESTIONS = [{"prompt": f"Count to {n}:", "answer": "e"} for n in range(24)]


def _run_and_resume(name, options, tmp_path, steps=(2, 4), checkpoint="checkpoint"):
    """Run a script, then from its first checkpoint alone, as after a kill. Return both outputs.

    The exports must be equal.
    """
    runs = [tmp_path / "whole", tmp_path / "resumed"]
    printed = []
    for output in runs:
        if printed:
            shutil.copytree(
                runs[0] / f"{checkpoint}-{steps[0]}", output / f"{checkpoint}-{steps[0]}"
            )
        argv = [*options, "--max_steps", steps[1], "--save_steps", steps[0], "--output_dir", output]
        environment = template_environment(CPU) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
        printed.append(
            run_ranks(
                printed_by, 2, run_recipe, argv, f"examples/{name}.py", environment=environment
            )[0]
        )
    exported = [next((run / "export").glob("*.safetensors")) for run in runs]
    whole, resumed = map(load_file, exported)
    assert whole.keys() == resumed.keys() and all(
        torch.equal(whole[key], resumed[key]) for key in whole
    )
    assert exported[0].name == exported[1].name
    return printed


def _options(tiny_model, tmp_path, rows, model="llama"):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model", tiny_model(model), "--data", data]


def test_own_trainer_resumes_exactly_and_exports_a_full_model(tiny_model, text_file, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = ["--model", tiny_model("llama"), "--data", text_file]
    _, resumed = _run_and_resume("own_trainer", options, tmp_path)
    assert len(re.findall(r"\{'loss'", resumed)) == 2, resumed
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "resumed" / "export", output_loading_info=True
    )
    before = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).state_dict()
    assert not any(info.values())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "resumed" / "export").pad_token == "<|pad|>"


@pytest.mark.parametrize(
    ("name", "rows", "more"),
    [
        ("own_dpo", PAIRS, []),
        pytest.param("own_dpo", PAIRS, ["--full"], marks=pytest.mark.slow),
        pytest.param("own_kto", RATED, [], marks=pytest.mark.slow),
        pytest.param("own_reward", PAIRS, [], marks=pytest.mark.slow),
    ],
)
def test_own_preference_script_resumes_exactly_and_exports(name, rows, more, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    _run_and_resume(name, [*_options(tiny_model, tmp_path, rows), *more], tmp_path)
    auto = AutoModelForSequenceClassification if name == "own_reward" else AutoModelForCausalLM
    export = tmp_path / "resumed" / ("export" if more else "export_merged")
    _, info = auto.from_pretrained(export, output_loading_info=True)
    assert not any(info.values())


@pytest.mark.slow
def test_own_grpo_learns_from_its_reward_and_resumes_exactly(tiny_model, tmp_path):
    options = [*_options(tiny_model, tmp_path, QUESTIONS), "--max_completion_length", 12]
    printed, _ = _run_and_resume("own_grpo", options, tmp_path)
    assert any(float(value) > 0 for value in re.findall(r"'reward_std': '?([\d.e-]+)", printed)), (
        printed
    )


@pytest.mark.slow
def test_own_clm_resumes_exactly_and_evaluates_alike(tiny_model, text_file, tmp_path):
    files = [
        "--model_name_or_path",
        tiny_model("llama"),
        "--train_file",
        text_file,
        "--validation_file",
        text_file,
    ]
    training = [
        "--block_size",
        32,
        "--logging_steps",
        1,
        "--do_train",
        "--do_eval",
        "--report_to",
        "none",
    ]
    whole, resumed = _run_and_resume("own_clm", [*files, *training], tmp_path)
    assert "perplexity" in whole
    assert re.findall(r"eval_loss +=.*", whole) == re.findall(r"eval_loss +=.*", resumed)


@pytest.mark.slow
def test_own_loop_resumes_exactly_in_its_second_epoch_with_dropout(tiny_model, text_file, tmp_path):
    options = ["--model", tiny_model("gpt2"), "--data", text_file]
    whole, resumed = _run_and_resume(
        "own_loop", options, tmp_path, steps=(11, 14), checkpoint="step"
    )
    assert whole.splitlines()[-3:] == resumed.splitlines()[-3:]


def test_toy_model_under_fsdp_trains_as_under_ddp_and_each_rank_holds_half():
    found = {}
    for name, options in (("FSDP", []), ("DDP", ["--ddp"])):
        text = run_ranks(printed_by, 2, run_recipe, options, "examples/toy_fsdp.py")[0]
        assert text.startswith(f"{name} on 2 ranks: loss ")
        loss = float(text.split("loss ")[1].splitlines()[0])
        found[name] = (
            loss,
            [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", text)],
        )
    (loss, sharded), (replicated_loss, replicated) = found["FSDP"], found["DDP"]
    assert abs(loss - replicated_loss) < 1e-6
    assert (
        replicated[:2] == [4 * 4 * 256**2] * 2
        and [2 * held for held in sharded[:2]] == replicated[:2]
    )
    assert sharded[2] * 2 < replicated[2] * 1.01
