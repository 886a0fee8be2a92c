"""The task of lm-eval in examples/ runs on an export."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import yaml

from tests.recipes.launching import ROOT

FOLDER = ROOT / "examples" / "lm_eval"


def test_every_row_of_the_task_has_its_answer_among_its_choices():
    task = yaml.safe_load((FOLDER / "fsdp_facts.yaml").read_text())
    rows = [json.loads(line) for line in (ROOT / task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()]
    taught = (ROOT / "recipes" / "data" / "quickstart.jsonl").read_text()
    assert len(rows) == 6
    for row in rows:
        assert row["question"] in taught and len(set(row["choices"])) == 4 and 0 <= row["answer"] < 4
    assert len({row["answer"] for row in rows}) == 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval")
def test_task_is_run_on_an_export(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_fsdp_recipes import export_model

    source = tiny_model("llama")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    export = export_model(model, tmp_path / "export", tokenizer=tokenizer)
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--tasks", "fsdp_facts"]
    command += ["--model_args", f"pretrained={export},dtype=float32,max_length=128"]
    command += ["--include_path", str(FOLDER), "--output_path", str(tmp_path / "result.json")]
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    [file] = tmp_path.glob("result*.json")
    result = json.loads(file.read_text())["results"]["fsdp_facts"]
    assert 0 <= result["acc,none"] <= 1 and result["sample_len"] == 6
