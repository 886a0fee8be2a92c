"""`hf-fsdp generate`: chats, adapters, prompts from standard input, and settings of generation."""

import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
from typer.testing import CliRunner

from hf_fsdp_recipes import cli
from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools.generate import complete

CHAT = [
    {"role": "user", "content": "The big fox"},
    {"role": "assistant", "content": "runs over the fence"},
    {"role": "user", "content": "The small dog"},
    {"role": "assistant", "content": "jumps over the river"},
]


def run(*arguments, text=None):
    """Return the standard output and the standard error of a command that succeeds."""
    words = ["generate", *map(str, arguments)]
    result = CliRunner().invoke(cli.app, words, input=text, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def chatting(tiny_model, tmp_path_factory):
    """Return a model that knows CHAT by heart.

    Its generation_config.json names another end than its chat template, as those of many base
    models do.
    """
    directory = tmp_path_factory.mktemp("chatting")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    ids = tokenizer.apply_chat_template(CHAT, return_tensors="pt", return_dict=True)["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|system|>")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_an_answer_ends_where_the_chat_template_ends_a_turn(chatting):
    answers, times = run(chatting, "--chat", text="The big fox\n\nThe small dog\n")
    assert answers == "runs over the fence\njumps over the river\n"
    assert "> The big fox (" in times and "> The small dog (" in times
    prompts = ["--prompt", "The big fox", "--prompt", "The small dog"]
    assert run(chatting, "--chat", *prompts)[0] == answers
    assert (
        complete(chatting, ["The big fox"] * 2, is_chat=True, max_new_tokens=50)
        == ["runs over the fence"] * 2
    )


def test_an_answer_ends_before_a_stop_string(chatting):
    words = [chatting, "--chat", "--prompt", "The big fox", "--stop", "river", "--stop", " the f"]
    assert run(*words)[0] == "runs over\n"


def test_without_chat_each_line_of_standard_input_is_continued(tiny_model):
    answers, times = run(tiny_model("llama"), "--max_new_tokens", 5, text="The big\nThe\n")
    expected = complete(tiny_model("llama"), ["The big", "The"], max_new_tokens=5)
    assert answers == "".join(f"{answer}\n" for answer in expected)
    assert times.count(" s)\n") == 2


def test_fields_of_generation_config_are_those_of_transformers(tiny_model):
    words = [tiny_model("llama"), "--prompt", "The big", "--max_new_tokens", 20]
    greedy = run(*words)[0]
    assert run(*words, "do_sample=true", "top_k=1")[0] == greedy
    assert run(*words, "do_sample=true", "temperature=9.0")[0] != greedy
    for field, problem in (
        ("temperature=0.7", "do_sample"),
        ("do_sample", "NAME=VALUE"),
        ("temprature=1", "temprature"),
        ("max_new_tokens=0", "must be greater than 0"),
    ):
        with pytest.raises(ToolError, match=problem):
            run(*words, field)


def test_an_adapter_finds_its_base_model_elsewhere_and_uses_its_own_tokenizer(chatting, tmp_path):
    base = shutil.copytree(chatting, tmp_path / "base")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapter = tmp_path / "adapter"
    get_peft_model(model, lora).save_pretrained(adapter)
    words = [adapter, "--prompt", "The big fox", "--max_new_tokens", 8]
    adapted = run(*words)[0]
    assert adapted != run(base, *words[1:])[0]
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(ToolError, match=r"adapter cannot be loaded .*--base-model.*/base"):
        run(*words)
    assert run(*words, "--base-model", moved)[0] == adapted
    with pytest.raises(ToolError, match="chat_template"):
        tokenizer = AutoTokenizer.from_pretrained(moved)
        tokenizer.chat_template = None
        tokenizer.save_pretrained(adapter)
        run(*words, "--base-model", moved, "--chat")


def test_weights_that_a_model_lacks_are_named(chatting, tmp_path, caplog):
    model = AutoModelForCausalLM.from_pretrained(chatting)
    weights = model.state_dict()
    del weights["model.layers.0.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    AutoTokenizer.from_pretrained(chatting).save_pretrained(tmp_path)
    logging.set_verbosity_warning()  # the default outside of tests
    logging.enable_propagation()
    complete(tmp_path, ["The big fox"], max_new_tokens=1)
    logging.disable_propagation()
    logging.set_verbosity_error()
    assert "up_proj" in caplog.text
