"""The README's Python block, run as it is printed: it trains, and started again it resumes."""

import os
import re
import shutil
from pathlib import Path

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

README = Path(__file__).resolve().parents[1] / "README.md"


def _run(code, model, rows, directory):
    from datasets import load_dataset
    from transformers import AutoTokenizer, Trainer, TrainingArguments

    def tokenize(row):
        tokens = tokenizer(
            row["text"], truncation=True, max_length=16, padding="max_length"
        ).input_ids
        return {"input_ids": tokens, "labels": tokens}

    os.chdir(directory)
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = TrainingArguments(
        "runs/mine", max_steps=2, save_steps=1, report_to="none", disable_tqdm=True
    )
    data = load_dataset("json", data_files=str(rows), split="train").map(
        tokenize, remove_columns="text"
    )
    names = {"Trainer": Trainer, "args": args, "rows": data, "tokenizer": tokenizer}
    exec(code.replace("path/or/hub-id", str(model)), names)
    return names["trainer"].state.global_step, sorted(
        path.name for path in Path("runs/mine").iterdir()
    )


def test_the_block_trains_exports_and_resumes(tiny_model, text_file, tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    arguments = (_run, 2, code, tiny_model("llama"), text_file, tmp_path)
    environment = fsdp_environment(FSDP2)
    written = (2, ["checkpoint-1", "checkpoint-2", "export"])
    assert run_ranks(*arguments, environment=environment) == [written, written]
    for directory in ("checkpoint-2", "export"):
        shutil.rmtree(tmp_path / "runs" / "mine" / directory)
    assert run_ranks(*arguments, environment=environment) == [written, written]
