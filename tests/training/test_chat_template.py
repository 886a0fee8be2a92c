"""The conversation format of the Llama-2-70B recipe: its text, its labels, and where generation stops."""

import json

import pytest
import yaml

from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.training.arguments import parse_arguments
from hf_fsdp_recipes.training.data.preparation import prepare
from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows
from tests.recipes.launching import ROOT

RECIPE = read_recipe("llama2_70b_chat_full")
FORMAT = ("chat_template_path", "special_tokens", "eos_token")
ONE_TURN = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
]
SECOND_TURN = [{"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}]
RENDERED = "<|system|> s <|endoftext|> <|prompter|> q <|endoftext|> <|assistant|> a <|endoftext|>"


@pytest.fixture
def recipe(tiny_model, tmp_path, monkeypatch):
    """Return a function that parses the recipe, with rows of the given conversations."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)

    def parse(conversations, **settings):
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
        common = {
            "model_name_or_path": str(tiny_model("llama")),
            "output_dir": str(tmp_path / "run"),
            "report_to": "none",
        }
        form = {key: RECIPE[key] for key in FORMAT}
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump({"dataset_name": str(rows), "max_length": 128} | common | form | settings))
        return parse_arguments(["--config", str(file)])

    return parse


@pytest.fixture
def tokenizer(recipe):
    arguments = recipe([ONE_TURN])
    return tokenizer_for_rows(load_tokenizer(arguments), arguments.training)


def test_template_renders_the_format_of_the_document(tokenizer):
    assert tokenizer.apply_chat_template(ONE_TURN, tokenize=False) == RENDERED
    longer = tokenizer.apply_chat_template(ONE_TURN + SECOND_TURN, tokenize=False)
    assert longer == RENDERED + " <|prompter|> q2 <|endoftext|> <|assistant|> a2 <|endoftext|>"
    assert tokenizer.apply_chat_template(ONE_TURN[1:], tokenize=False) == RENDERED.removeprefix(
        "<|system|> s <|endoftext|> "
    )


def test_question_to_the_model_is_the_training_text_up_to_its_answer(tokenizer):
    asked = tokenizer.apply_chat_template(ONE_TURN[:2], add_generation_prompt=True, tokenize=True, return_dict=False)
    trained = tokenizer.apply_chat_template(ONE_TURN, tokenize=True, return_dict=False)
    assert trained[: len(asked)] == asked
    assert tokenizer.decode(trained[len(asked) :]) == " a <|endoftext|>"


def test_markers_are_single_tokens_and_the_last_one_ends(tokenizer):
    for marker in RECIPE["special_tokens"]:
        assert len(tokenizer(marker, add_special_tokens=False)["input_ids"]) == 1, marker
    assert tokenizer.eos_token == "<|endoftext|>"


def test_assistant_only_loss_learns_the_answers_and_their_end(recipe):
    arguments = recipe([ONE_TURN + SECOND_TURN, ONE_TURN], assistant_only_loss=True)
    tokenizer = tokenizer_for_rows(load_tokenizer(arguments), arguments.training)
    learned = [
        "".join(tokenizer.decode([label]) for label in row["labels"] if label != -100)
        for row in prepare(arguments, tokenizer).train
    ]
    assert sorted(learned) == [" a <|endoftext|>", " a <|endoftext|> a2 <|endoftext|>"]


def test_conversation_with_another_role_is_dropped_and_counted(recipe):
    arguments = recipe([ONE_TURN, ONE_TURN, [*ONE_TURN, {"role": "tool", "content": "42"}]])
    tokenizer = tokenizer_for_rows(load_tokenizer(arguments), arguments.training)
    [counts] = prepare(arguments, tokenizer).counts.values()
    assert counts.describe(128).startswith("kept 2 of 3 rows; dropped 1 rejected by the chat template (line ")
