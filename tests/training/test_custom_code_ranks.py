"""A model with its own code (`trust_remote_code`) trains, exports and verifies on one rank and on two, without a prompt."""

import json
import sys

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

CONFIG = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODEL = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def own_model(tiny_model, tmp_path):
    """Return a model directory with code for its own config, model and tokenizer classes."""
    import shutil

    directory = shutil.copytree(tiny_model("llama"), tmp_path / "own")
    for name, text in (("configuration_own", CONFIG), ("modeling_own", MODEL), ("tokenization_own", TOKENIZER)):
        (directory / f"{name}.py").write_text(text)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def _run_recipe(model_dir, data_file, output_dir, trust):
    """Train two steps and export; return the class names of model and tokenizer."""
    sys.stdin = None  # a prompt would fail
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.build import build_trainer, finish

    arguments = parse_arguments(
        [
            *("--model_name_or_path", model_dir, "--dataset_name", data_file, "--output_dir", output_dir),
            *("--max_steps", "2", "--max_length", "64", "--per_device_train_batch_size", "1", "--report_to", "none"),
            *("--verify_export", "logits", "--disable_tqdm", "true", "--trust_remote_code", trust),
        ]
    )
    trainer = build_trainer(arguments)
    names = (type(trainer.model).__name__, type(trainer.processing_class).__name__)
    trainer.train()
    finish(trainer, arguments)
    return names


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_custom_code_trains_and_its_export_loads(own_model, text_file, tmp_path, world_size):
    environment = fsdp_environment(FSDP2) | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    arguments = (str(own_model), str(text_file), str(tmp_path / "run"), "true")
    names = run_ranks(_run_recipe, world_size, *arguments, environment=environment, timeout_seconds=180)
    assert names == [("OwnForCausalLM", "OwnTokenizer")] * world_size
    assert {file.name for file in (tmp_path / "run" / "export").glob("*.py")} >= {
        "configuration_own.py",
        "modeling_own.py",
    }


def test_custom_code_without_trust_is_one_error_and_no_prompt(own_model, text_file, tmp_path):
    environment = fsdp_environment(FSDP2) | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    arguments = (str(own_model), str(text_file), str(tmp_path / "run"), "false")
    errors = run_ranks(_run_recipe, 2, *arguments, environment=environment, expect_failure=True)
    assert errors[0] == errors[1]
    assert errors[0][0] == "LoadError"
    assert "trust_remote_code" in errors[0][1]
