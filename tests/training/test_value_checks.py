"""Values that would silently change the training, or fail after minutes, are refused before anything is loaded."""

import errno
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

from hf_fsdp_recipes.errors import RecipeError, TemplateError
from hf_fsdp_recipes.training import model as model_module
from hf_fsdp_recipes.training.arguments import RecipeArguments, parse_arguments
from hf_fsdp_recipes.training.value_checks import check_recipe
from tests.training.test_arguments import NEEDED, no_launch, write  # noqa: F401

CLASSES = (ScriptArguments, SFTConfig, ModelConfig, RecipeArguments, DatasetMixtureConfig)
NUMBERS = {
    "learning_rate": ("-1", "nan", "inf"),
    "per_device_train_batch_size": ("0",),
    "per_device_eval_batch_size": ("-2",),
    "gradient_accumulation_steps": ("0",),
    "num_train_epochs": ("0", "nan", "-1"),
    "max_steps": ("0", "-5"),
    "max_length": ("0", "-5"),
    "weight_decay": ("nan",),
    "max_grad_norm": ("nan", "-1"),
    "lora_r": ("0",),
    "lora_dropout": ("1", "nan"),
    "adam_beta1": ("1",),
    "dataloader_num_workers": ("-1",),
    "shuffle_buffer_size": ("-1",),
    "throughput_warmup_steps": ("-1",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NUMBERS.items() for value in values])
def test_number_out_of_range_is_refused_with_its_value(name, value):
    with pytest.raises(RecipeError, match=rf"{name} is {value}(\.0)?\. Set it to"):
        parse_arguments([*NEEDED, f"--{name}", value])


def test_all_numbers_out_of_range_are_listed_at_once():
    with pytest.raises(RecipeError, match=r"max_length is -5.*learning_rate is -1"):
        parse_arguments([*NEEDED, "--max_length", "-5", "--learning_rate", "-1"])


def test_usual_numbers_pass(tmp_path):
    parse_arguments([*NEEDED, "--learning_rate", "0", "--max_steps", "-1", "--num_train_epochs", "0.5"])
    parse_arguments([*write(tmp_path, max_length=None, warmup_steps=0.1), *NEEDED])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate: 1e-4\nmax_steps: 3\nlearning_rate: 1e-3\n", "learning_rate in line 1 and again in line 3"),
        ("datasets:\n  - path: a\n    path: b\n", "path in line 2 and again in line 3"),
        ("run_name: 2024-13-01\n", r"month must be in 1\.\.12\) in line 1"),
        ("run_name: a\0\n", r"character '\\x00' in line 1"),
        ("model_init_kwargs: {a: 1, a: 2}\n", "a in line 1 and again in line 1"),
    ],
)
def test_key_that_is_set_twice_or_has_no_valid_value_is_refused_with_its_line(tmp_path, text, words):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=words):
        parse_arguments(["--config", str(tmp_path / "recipe.yaml"), *NEEDED])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora_r", "64", "--lora_target_modules", "all-linear"], "lora_r is 64 but use_peft is not set.*or drop lora_r"),
        (["--lora_alpha", "8"], "lora_alpha is 8 but use_peft"),
        (["--lora_r", "16"], "lora_r is 16 but use_peft is not set"),  # 16 is the default
        (["--lora-r=16"], "lora_r is 16 but use_peft is not set"),
        (["--use_dora"], "use_dora is True but use_peft"),
        (["--use_rslora"], "use_rslora is True but use_peft"),
        (["--load_in_4bit"], "quantized weights cannot be trained.*use_peft: true"),
    ],
)  # fmt: skip
def test_adapter_settings_without_an_adapter_are_refused(flags, words):
    with pytest.raises(RecipeError, match=words):
        parse_arguments([*NEEDED, *flags])
    assert parse_arguments([*NEEDED, *flags, "--use_peft"])


@pytest.fixture
def llama(tiny_model):
    from transformers import AutoConfig

    from hf_fsdp_recipes.loading.build_on_meta import build_on_meta

    config = AutoConfig.from_pretrained(tiny_model("llama"))
    return build_on_meta(config, config.dtype)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"lora_target_modules": ["qproj"]},
            "lora_target_modules names qproj, but LlamaForCausalLM has no such name.*q_proj",
        ),
        ({"lora_target_modules": ["q_proj", "fc1"]}, "names fc1,"),
        ({"lora_target_modules": r".*\.fc\d"}, r"names \.\*"),
        ({"lora_modules_to_save": ["head"]}, "lora_modules_to_save names head"),
        ({"lora_target_parameters": ["experts.gate_up_proj"]}, "lora_target_parameters names experts"),
        ({"lora_target_parameters": "experts.gate_up_proj"}, "lora_target_parameters names experts.gate_up_proj,"),
    ],
)
def test_adapter_name_that_the_model_lacks_is_refused_with_those_it_has(llama, tmp_path, settings, words):
    arguments = parse_arguments([*write(tmp_path, use_peft=True, **settings), *NEEDED])
    with pytest.raises(RecipeError, match=words):
        model_module._check_adapter_names(llama, arguments.model)


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj"], "q_proj", ["self_attn.q_proj", "up_proj"], r".*\.[qk]_proj"]
)
def test_adapter_names_that_the_model_has_pass(llama, tmp_path, targets):
    from peft import get_peft_model
    from trl import get_peft_config

    arguments = parse_arguments([*write(tmp_path, use_peft=True, lora_target_modules=targets), *NEEDED])
    model_module._check_adapter_names(llama, arguments.model)
    assert get_peft_model(llama, get_peft_config(arguments.model), low_cpu_mem_usage=True)


@pytest.mark.parametrize("key", ["tp_size", "cp_size", "sp_size"])
def test_unsupported_parallelism_is_refused_at_launch(monkeypatch, key):
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{key.upper()}", "2")
    with pytest.raises(TemplateError, match=rf"parallelism is not supported, but {key} is 2"):
        parse_arguments(NEEDED)


def test_fp8_is_refused_at_launch(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(TemplateError, match="mixed_precision is fp8, which has never been tested"):
        parse_arguments(NEEDED)


def test_trainer_that_sees_fewer_ranks_than_were_launched_is_refused(monkeypatch):
    from types import SimpleNamespace

    from hf_fsdp_recipes.configs.launch import check_launch

    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(TemplateError, match=r"WORLD_SIZE is 4 but Trainer sees 1 process\. Start the script with"):
        check_launch(SimpleNamespace(world_size=1, parallelism_config=None))
    check_launch(SimpleNamespace(world_size=4, parallelism_config=None))


def test_model_without_layers_is_refused(tiny_model):
    from hf_fsdp_recipes.errors import LoadError
    from hf_fsdp_recipes.loading.build_on_meta import read_config

    with pytest.raises(LoadError, match="num_hidden_layers is 0"):
        read_config(str(tiny_model("llama")), "num_hidden_layers=0")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("attention: fast", "one of auto, flash"),
        ("packing: 3", "true or false"),
        ("max_steps: 2.5", "an integer"),
        ("max_steps: [1]", "an integer"),
        ("dataset_name: [a]", "a string"),
        ("load_source: all", "one of rank0, direct, auto"),
        ("eval_strategy: no", 'Write eval_strategy: "no"'),
    ],
)
def test_value_of_the_wrong_type_is_refused(tmp_path, line, says):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(line + "\n")
    with pytest.raises(RecipeError, match=says):
        check_recipe(str(recipe), CLASSES)


def test_shipped_recipes_have_the_right_types():
    recipes = [
        file for file in (Path(__file__).parents[2] / "recipes").glob("*.yaml") if "max_length" in file.read_text()
    ]
    assert len(recipes) > 10
    for recipe in recipes:
        check_recipe(str(recipe), CLASSES)


@pytest.mark.slow
def test_shared_memory_that_is_really_full_is_refused():
    code = "from hf_fsdp_recipes.training.arguments import parse_arguments; import sys; parse_arguments(sys.argv[1:])"
    fill = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    if subprocess.run(["unshare", "--mount", "sh", "-c", fill], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root, to mount a small file system")
    command = [sys.executable, "-c", code, *NEEDED, "--dataloader_num_workers", "1"]
    run = ["unshare", "--mount", "sh", "-c", f'{fill}; exec "$@"', "sh", *command]
    failed = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120)
    assert failed.returncode == 1
    assert "dataloader_num_workers is 1, but" in failed.stderr and "Free space in /dev/shm" in failed.stderr


@pytest.mark.parametrize(("name", "value"), [("dataset_num_proc", "2"), ("dataloader_num_workers", "1")])
def test_full_shared_memory_is_refused_if_processes_would_use_it(monkeypatch, name, value):
    def no_lock():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(multiprocessing, "Lock", no_lock)
    with pytest.raises(RecipeError, match=rf"{name} is {value}, but.*No space left.*Free space in /dev/shm"):
        parse_arguments([*NEEDED, f"--{name}", value])
    parse_arguments(NEEDED)
