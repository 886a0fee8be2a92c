"""A recipe's file and the command line: what is read, and which mistakes are found."""

import pytest

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training.arguments import parse_arguments

FILE = """\
model_name_or_path: m
dataset_name: rows.jsonl
output_dir: out
use_cpu: true
bf16: false
report_to: none
"""


@pytest.fixture
def parse(tmp_path):
    """Return a function that parses a recipe with more lines and more options."""

    def parse(lines="", *options):
        file = tmp_path / "recipe.yaml"
        file.write_text(FILE + lines)
        return parse_arguments(["--config", str(file), *options])

    return parse


def test_the_command_line_overrides_the_recipe(parse):
    found = parse("learning_rate: 1.0e-3\nmax_steps: 5\n", "--max_steps", "7")
    assert (found.training.learning_rate, found.training.max_steps) == (1e-3, 7)


def test_a_path_is_found_beside_the_recipe(parse, tmp_path):
    (tmp_path / "rows.jsonl").touch()
    assert parse().script.dataset_name == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        ("learning_rat: 1\n", (), "learning_rat is not an argument; did you mean learning_rate?"),
        ("", ("--learning_rat", "1"), "did you mean learning_rate?"),
        (
            "",
            ("--learning", "1"),
            "learning is not an argument",
        ),  # argparse would take it for learning_rate
        ("max_steps: 3\nmax_steps: 4\n", (), "max_steps is set twice"),
        ("max_steps: 2.5\n", (), "invalid int value: '2.5'"),
        ("learning_rate: [1.0e-3]\n", (), "invalid float value: '[0.001]'"),
        ("max_steps: many\n", (), "many"),
        ("prompt_format: poem\n", (), "poem"),
        ("save_strategy: sometimes\n", (), "sometimes"),
        ("no: 1\n", (), "False is not an argument"),
        ("a: [\n", (), "cannot be read"),
        ("- a\n", (), "cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence(parse, lines, options, says):
    with pytest.raises(RecipeError) as error:
        parse(lines, *options)
    assert says in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_missing_recipe_is_named():
    with pytest.raises(RecipeError, match=r"nothing\.yaml cannot be read"):
        parse_arguments(["--config", "nothing.yaml"])


def test_every_kind_of_value_in_a_recipe_reaches_trl(parse):
    found = parse(
        "lora_target_modules: all-linear\npad_to_multiple_of: 8\nmax_length: null\npacking: true\n"
        "lr_scheduler_kwargs: {min_lr: 0.1}\neval_strategy: 'no'\nweight_decay: 1\n"
    )
    assert found.model.lora_target_modules == "all-linear"
    assert found.training.pad_to_multiple_of == 8
    assert found.training.max_length is None and found.training.packing is True
    assert found.training.lr_scheduler_kwargs == {"min_lr": 0.1}
    assert found.training.weight_decay == 1.0
