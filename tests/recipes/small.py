"""Small substitutes for a recipe's model and data.

They have the same architecture and the same columns.
"""

import json
import re
from pathlib import Path

import yaml

from hf_fsdp_recipes.tools.rehearse import ON_CPU, SMALL, write_recipe
from tests.conftest import SENTENCES, make_tokenizer
from tests.ranks.harness import template_environment
from tests.recipes.launching import ROOT

# Columns of the datasets that the recipes name, as their Hub pages show them.
COLUMNS = {
    "tatsu-lab/alpaca": lambda i, s: {
        "instruction": f"Say it {i} times",
        "input": s if i % 2 else "",
        "output": s,
    },
    "smangrul/code-chat-assistant-v1": lambda i, s: {
        "content": f"<|prompter|> {i} <|endoftext|> <|assistant|> {s}"
    },
    "trl-lib/Capybara": lambda i, s: {
        "source": "Airoboros",
        "messages": [
            {"role": "user", "content": f"Number {i}?"},
            {"role": "assistant", "content": s},
        ],
        "num_turns": 1,
    },
    "allenai/c4": lambda i, s: {"text": f"{s} {s}", "timestamp": str(i), "url": "example.org"},
}
SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"


def command_of(recipe: Path) -> list[str]:
    """Return the words of the command in a recipe's comment, after `hf-fsdp sft`."""
    return re.search(r"^# +hf-fsdp sft (.*?)\\?$", recipe.read_text(), re.M)[1].split()


def environment_of(recipe: Path, name: str | None = None) -> dict[str, str]:
    """Return the variables of CPU ranks with a template.

    By default, it is the one in the recipe's command.
    """
    name = name or command_of(recipe)[command_of(recipe).index("--accelerate_config") + 1]
    template = ROOT / "accelerate_configs" / f"{name}.yaml"
    num_ranks = 4 if "parallelism_config:" in template.read_text() else 2
    ranks = [f"--num_processes={num_ranks}", *SMALL]
    return template_environment(template, *ON_CPU, *ranks) | {"ACCELERATE_USE_CPU": "true"}


def write_rows(dataset: str, directory: Path) -> Path:
    """Write 72 training and 24 test rows with the columns of a dataset.

    A file of this repository is returned unchanged.
    """
    if (ROOT / "recipes" / dataset).is_file():
        return ROOT / "recipes" / dataset
    directory.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(COLUMNS[dataset](i, s)) + "\n" for i, s in enumerate(SENTENCES)]
    (directory / "train.jsonl").write_text("".join(rows))
    (directory / "test.jsonl").write_text("".join(rows[:24]))
    return directory


def small_arguments(recipe: Path, directory: Path, *fields: str) -> list[str]:
    """Write a tiny model of a recipe's architecture and small rows.

    Return the arguments of recipes/sft.py.
    """
    tokenizer = directory / "tokenizer"
    make_tokenizer(tokenizer)
    settings = yaml.safe_load(recipe.read_text())
    rows = [
        "--dataset_name",
        str(write_rows(settings["dataset_name"], directory / "rows")),
        "--dataset_config",
        "",
    ]
    model = (
        []
        if {"model_name_or_path", "config_name"} & settings.keys()
        else ["--model_name_or_path", SMOLLM]
    )
    written = write_recipe(
        recipe, directory, [*model, "--tokenizer_name", str(tokenizer), *rows, *fields]
    )
    return [*written, *rows, *fields]
