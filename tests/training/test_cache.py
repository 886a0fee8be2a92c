"""A prepared directory is complete or absent, works as dataset_name, and is refused by runs with other settings."""

import json

import pytest
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.arguments import parse_arguments
from hf_fsdp_recipes.training.build import load_rows
from hf_fsdp_recipes.training.data import cache
from hf_fsdp_recipes.training.data.preparation import Preparation
from hf_fsdp_recipes.training.tokenizer import load_tokenizer


@pytest.fixture
def argv(tiny_model, text_file, tmp_path, monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def make(*more, dataset=text_file, model=None):
        model = model or tiny_model("llama")
        common = ["--model_name_or_path", model, "--dataset_name", dataset, "--output_dir", tmp_path / "run"]
        return [str(value) for value in (*common, "--max_length", 48, "--packing", "true", *more)]

    return make


@pytest.fixture
def directory(argv, tmp_path):
    cache.prepare_directory(argv(), tmp_path / "prepared")
    return tmp_path / "prepared"


def load(arguments):
    return load_rows(arguments, load_tokenizer(arguments))


def test_run_reads_prepared_rows_and_prepares_nothing(argv, directory, monkeypatch):
    raw = load(parse_arguments(argv()))
    monkeypatch.setattr(Preparation, "tokenize", None)
    arguments = parse_arguments(argv(dataset=directory))
    assert load(arguments).train.to_list() == raw.train.to_list()
    assert arguments.training.dataset_kwargs == {"skip_prepare_dataset": True}


def test_directory_loads_with_datasets_and_records_its_settings(directory, argv, tiny_model):
    from datasets import load_from_disk

    splits = load_from_disk(directory)
    manifest = json.loads((directory / cache.PREPARED_FILE).read_text())
    assert manifest["num_sequences"] == {"train": len(splits["train"]), "test": 0}
    assert (manifest["max_length"], manifest["packing"], manifest["packing_strategy"]) == (48, True, "bfd")
    assert manifest["tokenizer"]["name"] == str(tiny_model("llama"))
    assert len(manifest["tokenizer"]["sha256"]) == 64
    [counts] = manifest["rows"].values()
    assert (counts["rows"], counts["kept"]) == (72, 72)


OTHERS = {
    "max_length was 48 and is now 64": ["--max_length", "64"],
    "packing was True and is now False": ["--packing", "false"],
    "packing_strategy was bfd and is now wrapped": ["--packing_strategy", "wrapped"],
    "completion_only_loss was None and is now False": ["--completion_only_loss", "false"],
    "prompt_template was alpaca and is now chat": ["--prompt_template", "chat"],
    "shuffle_dataset was False and is now True": ["--shuffle_dataset", "true"],
    "the tokenizer was different": ["--eos_token", "<|bos|>"],
}


@pytest.mark.parametrize("words", OTHERS)
def test_run_with_other_settings_is_refused(words, argv, directory):
    with pytest.raises(DataError) as error:
        load(parse_arguments(argv(*OTHERS[words], dataset=directory)))
    assert words in str(error.value)
    assert "prepare-data again" in str(error.value)


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"tokenizer": "x"}', "{"])
def test_damaged_settings_are_refused(text, argv, tmp_path):
    (tmp_path / cache.PREPARED_FILE).write_text(text)
    with pytest.raises(DataError, match=r"prepared\.json is damaged: .*Prepare the rows again"):
        load(parse_arguments(argv(dataset=tmp_path)))


def test_evaluation_needs_rows_that_were_prepared(argv, directory):
    with pytest.raises(DataError, match="without evaluation rows"):
        load(parse_arguments(argv("--eval_strategy", "epoch", dataset=directory)))


def test_evaluation_rows_are_prepared_too(argv, tmp_path):
    settings = ["--eval_strategy", "epoch", "--validation_split_percentage", "25"]
    cache.prepare_directory(argv(*settings), tmp_path / "both")
    raw = load(parse_arguments(argv(*settings)))
    rows = load(parse_arguments(argv(*settings, dataset=tmp_path / "both")))
    assert rows.evaluation.to_list() == raw.evaluation.to_list()


def test_interrupted_preparation_leaves_nothing(argv, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_manifest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.prepare_directory(argv(), tmp_path / "out" / "prepared")
    assert not list((tmp_path / "out").iterdir())


def test_existing_directory_is_not_overwritten(argv, directory):
    before = (directory / cache.PREPARED_FILE).read_text()
    with pytest.raises(DataError, match="already exists"):
        cache.prepare_directory(argv("--max_length", "64"), directory)
    assert (directory / cache.PREPARED_FILE).read_text() == before


def test_stream_is_not_prepared(argv, tmp_path):
    with pytest.raises(DataError, match="dataset_streaming false"):
        cache.prepare_directory(argv("--dataset_streaming", "true", "--max_steps", "3"), tmp_path / "out")


def test_command_takes_a_recipe_and_any_field(argv, tmp_path):
    words = argv()
    recipe = tmp_path / "recipe.yaml"
    fields = dict(zip(words[::2], words[1::2], strict=True))
    recipe.write_text("".join(f"{name[2:]}: {value}\n" for name, value in fields.items()) + "bf16: true\ntf32: true\n")
    output = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["prepare-data", "--config", str(recipe), "--output", str(output), "--max_length", "32"]
    )
    assert done.exit_code == 0, done.output
    assert "kept 72 of 72 rows" in done.output
    assert f"prepared: {output} (" in done.output
    assert json.loads((output / cache.PREPARED_FILE).read_text())["max_length"] == 32
