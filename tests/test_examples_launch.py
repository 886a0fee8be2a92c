"""The scripts in examples/, as a user would run them: launched on two CPU ranks, resumed, exported."""

import re
import shutil

from tests.ranks.harness import run_ranks, template_environment
from tests.recipes.launching import ROOT, run, run_recipe

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
    shutil.copytree(whole / "checkpoint-2", output / "checkpoint-2")  # all that a run killed after step 2 leaves

    resumed = run(CPU_TEMPLATE, [*options, "--output_dir", output], script=OWN_TRAINER)
    assert resumed.returncode == 0, resumed.stdout
    assert len(re.findall(r"\{'loss'", resumed.stdout)) == 3, resumed.stdout

    model, info = AutoModelForCausalLM.from_pretrained(output / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    uninterrupted = AutoModelForCausalLM.from_pretrained(whole / "export").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).state_dict()
    assert all(torch.equal(value, uninterrupted[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(output / "export").pad_token == "<|pad|>"
