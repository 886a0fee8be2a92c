"""Small substitutes for a recipe's model and data, with the same architecture and the same columns.

    python -m tests.recipes.small meta-llama/Llama-2-7b-hf tatsu-lab/alpaca runs/small

writes runs/small/model and runs/small/rows, for the walkthroughs in docs/.
"""

import json
import sys
from pathlib import Path

from hf_fsdp_recipes.configs.model_configs import MODELS
from tests.conftest import SENTENCES, make_tokenizer
from tests.recipes.launching import ROOT

# Columns of the datasets that the recipes name, as their Hub pages show them.
COLUMNS = {
    "tatsu-lab/alpaca": lambda i, s: {"instruction": f"Say it {i} times", "input": s if i % 2 else "", "output": s},
    "smangrul/code-chat-assistant-v1": lambda i, s: {"content": f"<|prompter|> {i} <|endoftext|> <|assistant|> {s}"},
    "HuggingFaceTB/smoltalk": lambda i, s: {
        "messages": [{"role": "user", "content": f"Number {i}?"}, {"role": "assistant", "content": s}]
    },
    "allenai/c4": lambda i, s: {"text": f"{s} {s}", "timestamp": str(i), "url": "example.org"},
}


def all_recipes() -> list[Path]:
    """Return every shipped recipe; other files in the folder have no output_dir."""
    found = sorted((ROOT / "recipes").glob("*.yaml"))
    return [file for file in found if "\noutput_dir:" in file.read_text()]


def recipes() -> list[Path]:
    """Return the recipes for SFT; test_trainers_ranks.py tests the other recipes."""
    return [file for file in all_recipes() if file.read_text().startswith("# hf-fsdp sft ")]


def template_of(recipe: Path) -> Path:
    """Return the template that a recipe's first line names."""
    command = recipe.read_text().splitlines()[0].split()
    return ROOT / "accelerate_configs" / f"{command[command.index('--accelerate_config') + 1]}.yaml"


def full_size_config(model_id: str):
    """Return the model's published config."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(MODELS / f"{model_id.replace('/', '--')}.json")


def write_model(model_id: str, directory: Path, vocab_size: int = 320) -> Path:
    """Write a small model of the same architecture, with random weights and a tokenizer of 300 tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_fsdp_recipes.training.tiny_config import tiny_config

    config = tiny_config(full_size_config(model_id), vocab_size=vocab_size)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def write_rows(dataset: str, directory: Path) -> Path:
    """Write 72 training and 24 test rows with the columns of a dataset; a file of this repository is returned unchanged."""
    if (ROOT / dataset).is_file():
        return ROOT / dataset
    directory.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(COLUMNS[dataset](i, s)) + "\n" for i, s in enumerate(SENTENCES)]
    (directory / "train.jsonl").write_text("".join(rows))
    (directory / "test.jsonl").write_text("".join(rows[:24]))
    return directory


if __name__ == "__main__":
    model_id, dataset, target = sys.argv[1:]
    print(write_model(model_id, Path(target) / "model"), write_rows(dataset, Path(target) / "rows"))
