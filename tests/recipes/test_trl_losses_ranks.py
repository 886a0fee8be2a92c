"""A recipe trains what `trl sft` trains.

With the same rows and template, every step has the same loss.
"""

import json
import runpy
import sys

import pytest

from tests.ranks.harness import run_ranks, template_environment
from tests.recipes.launching import CPU, LORA, SETTINGS, run_recipe, write_recipe

PAIRS = [{"prompt": f"Count to {n}:", "completion": f" {n} and {n + 1}"} for n in range(24)]
CASES = {
    "full": {},
    "lora": LORA,
    "packing": {"packing": True},
    "chat": {},
    "completion": {},
}


def _run_trl(arguments):
    from hf_fsdp_recipes.upstream import patches

    patches.enable_cpu_ranks()  # stock Accelerate ignores FSDP on CPU ranks
    sys.argv = [
        "trl sft",
        *arguments,
        "--bf16",
        "false",
        "--use_cpu",
        "--dataloader_pin_memory",
        "false",
    ]
    runpy.run_module("trl.scripts.sft", run_name="__main__")


def _losses(output):
    history = json.loads((output / "checkpoint-4" / "trainer_state.json").read_text())[
        "log_history"
    ]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in ("lora", "packing") else pytest.mark.slow)
        for name in CASES
    ],
)
def test_every_step_has_the_loss_of_trl(case, tiny_model, text_file, chat_file, tmp_path):
    rows = tmp_path / "rows"  # `trl sft` reads folders, but no files
    rows.mkdir()
    source = chat_file if case == "chat" else text_file
    text = (
        "".join(json.dumps(row) + "\n" for row in PAIRS)
        if case == "completion"
        else source.read_text()
    )
    (rows / "train.jsonl").write_text(text)
    values = (
        SETTINGS | CASES[case] | {"model_name_or_path": tiny_model("llama"), "dataset_name": rows}
    )
    argv = write_recipe(tmp_path / "recipe.yaml", values)
    environment = template_environment(CPU) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    for run, name in ((run_recipe, "ours"), (_run_trl, "theirs")):
        run_ranks(run, 2, [*argv, "--output_dir", str(tmp_path / name)], environment=environment)
    ours, theirs = (_losses(tmp_path / name) for name in ("ours", "theirs"))
    assert len(ours) == 4 and ours == theirs
