"""The shipped configs have the published numbers of parameters, and are used only if the real config cannot be read."""

from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.configs import model_configs, validate
from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.tools.rehearsal import stand_ins
from tests.recipes import small

# Published on the models' pages; Hub pages count the elements of the safetensors files.
NUM_PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-2-70b-chat-hf": 68_976_648_192,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "openai-community/gpt2": 124_439_808,
    "openai/gpt-oss-20b": 20_914_757_184,
}


@pytest.fixture(autouse=True)
def _fresh():
    model_configs.find_config.cache_clear()
    yield
    model_configs.find_config.cache_clear()


def test_every_shipped_config_has_a_published_size():
    assert {file.stem.replace("--", "/") for file in model_configs.MODELS.iterdir()} == NUM_PARAMETERS.keys()


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_shipped_config_has_the_published_number_of_parameters(name):
    model = validate.build_on_meta(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]
    assert [type(model).__name__] == model.config.architectures


def test_every_model_and_dataset_of_the_recipes_is_known():
    for recipe in small.recipes():
        settings = read_recipe(recipe)
        for key in ("model_name_or_path", "tokenizer_name"):
            assert settings.get(key) is None or settings[key] in NUM_PARAMETERS, recipe
        assert settings["dataset_name"] in stand_ins._ROWS or Path(settings["dataset_name"]).is_file(), recipe


def test_gated_model_is_planned_from_the_shipped_config(monkeypatch):
    def refuse(name, **_):
        if name == "meta-llama/Llama-3.1-8B":
            raise OSError("You are trying to access a gated repo.")
        return original(name, **_)

    original = transformers.PreTrainedConfig.get_config_dict
    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", refuse)
    done = CliRunner().invoke(app, ["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpus", "8"])
    assert done.stdout.startswith("The config of meta-llama/Llama-3.1-8B cannot be read (no network, or no access)")
    assert "8.03B parameters" in done.stdout


def test_config_that_can_be_read_is_preferred(monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", lambda name, **_: ({}, {}))
    assert model_configs.find_config("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert model_configs.describe_source("Qwen/Qwen3-8B") == []


def test_local_directory_and_unknown_name_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert model_configs.find_config("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert model_configs.find_config("someone/else-7b") == "someone/else-7b"
