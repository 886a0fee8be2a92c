"""Faults that would make the final export fail are reported before training."""

import re
import shutil
from types import SimpleNamespace

import pytest

from hf_fsdp_recipes.errors import CheckpointError, ExportError, RecipeError


@pytest.fixture
def model():
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from tests.conftest import tiny_config

    with init_empty_weights():
        return AutoModelForCausalLM.from_config(tiny_config("llama"))


def test_export_of_a_model_on_meta_is_checked(model, tmp_path, monkeypatch):
    from hf_fsdp_recipes.export.from_model import check_export

    check_export(model, tmp_path / "export")
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * 2
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=num_bytes - 1))
    with pytest.raises(ExportError, match=f"needs {num_bytes:,} bytes"):
        check_export(model, tmp_path / "export", dtype="bfloat16")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=num_bytes))
    check_export(model, tmp_path / "export", dtype="bfloat16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"max_shard_size": "5GiB"}, "5GiB"), ({"merge_adapter": True}, "no adapter"), ({"dtype": "int8"}, "int8")],
)
def test_bad_arguments_are_known_before_training(model, tmp_path, arguments, words):
    from hf_fsdp_recipes.export.from_model import check_export

    with pytest.raises(ExportError, match=words):
        check_export(model, tmp_path / "export", **arguments)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.lora_embedding_A.default"),
        ({"lora_bias": True}, "an adapter with lora_bias"),
        ({"alora_invocation_tokens": [1]}, "an adapter with alora_invocation_tokens"),
        ({"kasa_config": {}}, "an adapter with kasa_config"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "an adapter with layer_replication"),
        ({"trainable_token_indices": [1]}, "an adapter with trainable_token_indices"),
    ],
)
def test_adapter_that_would_be_merged_only_in_part_is_refused(model, tmp_path, lora, words):
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import KasaConfig

    from hf_fsdp_recipes.export.from_model import check_export

    if "kasa_config" in lora:
        lora = {"kasa_config": KasaConfig()}
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | lora)
    with pytest.raises(ExportError, match=f"merge_adapter cannot merge .*{words}"):
        check_export(get_peft_model(model, config), tmp_path / "export", merge_adapter=True)


def test_two_parameters_of_one_name_are_not_exported(model):
    from hf_fsdp_recipes.export.export_plan import split_parameters

    names = [f"base_model.model.lm_head.modules_to_save.{adapter}.weight" for adapter in ("default", "ref")]
    with pytest.raises(ExportError, match=r"2 versions of lm_head\.weight"):
        split_parameters(model, dict.fromkeys(names, (307, 32)))


def test_engine_that_cannot_be_exported_is_refused(model, tmp_path, monkeypatch):
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_fsdp_recipes import ShardedCheckpointCallback

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setattr(AcceleratorState, "__init__", lambda self: None)
    monkeypatch.setattr(AcceleratorState, "distributed_type", DistributedType.DEEPSPEED, raising=False)
    callback = ShardedCheckpointCallback(export_dir=tmp_path / "export")
    with pytest.raises(CheckpointError, match="export_dir is set, but a model cannot be exported under DEEPSPEED"):
        callback.on_init_end(arguments, TrainerState(), TrainerControl(), model=model)


def test_hub_by_name_is_refused_with_what_to_pass():
    from hf_fsdp_recipes import ShardedCheckpointCallback
    from hf_fsdp_recipes.export.hub import HubTarget

    with pytest.raises(CheckpointError, match=r"HubTarget\('me/repo'\)"):
        ShardedCheckpointCallback(hub="me/repo")
    assert HubTarget("me/repo").is_private


@pytest.mark.parametrize("size", ["5GiB", "tiny", "-1"])
def test_recipe_with_a_bad_size_is_refused(size):
    from hf_fsdp_recipes.training.arguments import _check_export

    recipe = SimpleNamespace(export_max_shard_size=size, export_dtype=None, merge_adapter=False)
    with pytest.raises(RecipeError, match=f"export_max_shard_size is '{size}'"):
        _check_export(SimpleNamespace(recipe=recipe, model=None))


@pytest.mark.parametrize(
    ("prompt", "tokens", "words"),
    [
        ("prompt.txt", -1, "max_new_tokens is -1"),
        ("missing.txt", 4, "missing.txt cannot be"),
        ("empty.txt", 4, "empty.txt is empty"),
    ],
)
def test_generate_with_a_bad_argument_is_one_line(tiny_model, tmp_path, prompt, tokens, words):
    from hf_fsdp_recipes.export.generate import generate

    (tmp_path / "prompt.txt").write_text("The")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ExportError, match=words) as error:
        generate(tiny_model("llama"), tmp_path / prompt, max_new_tokens=tokens)
    assert "\n" not in str(error.value)
    with pytest.raises(ExportError, match="not a directory"):
        generate(tmp_path / "nothing", tmp_path / "prompt.txt")


def test_generate_prints_the_text_and_on_stderr_the_inference_time(tiny_model):
    from typer.testing import CliRunner

    from hf_fsdp_recipes.cli import app

    command = ["generate", str(tiny_model("llama")), "--prompt", "The big fox", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith("The big fox") and "inference time" not in result.stdout
    assert re.search(
        r"^inference time: \d+\.\d\d s for [1-4] tokens \(\d+\.\d tokens/s\)$", result.stderr, re.MULTILINE
    )


def test_export_with_a_damaged_file_is_not_loaded(tiny_model, tmp_path):
    from hf_fsdp_recipes.export.load_export import load_export

    damaged = shutil.copytree(tiny_model("llama"), tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ExportError, match="damaged cannot be loaded"):
        load_export(damaged)
