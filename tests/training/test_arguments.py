"""Recipes take TRL's names from YAML and the command line, and give one clear error for anything else."""

from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
import yaml

from hf_fsdp_recipes.errors import DataError, ExportError, RecipeError, TemplateError
from hf_fsdp_recipes.training import build, dtypes
from hf_fsdp_recipes.training.arguments import parse_arguments
from hf_fsdp_recipes.training.build import default_run_name

NEEDED = ["--model_name_or_path", "m", "--dataset_name", "d"]


@pytest.fixture(autouse=True)
def no_launch(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def write(tmp_path, **settings):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return ["--config", str(tmp_path / "recipe.yaml")]


def test_command_line_overrides_the_recipe(tmp_path):
    config = write(tmp_path, model_name_or_path="m", dataset_name="d", learning_rate=1e-3, max_steps=7)
    arguments = parse_arguments([*config, "--max_steps", "9"])
    assert arguments.training.max_steps == 9
    assert arguments.training.learning_rate == 1e-3
    assert arguments.recipe.load_source == "rank0"


def test_abbreviated_flag_is_refused_instead_of_being_lost(tmp_path):
    config = write(tmp_path, model_name_or_path="m", dataset_name="d")
    with pytest.raises(RecipeError, match=r"'--model_name'.*Did you mean model_name_or_path"):
        parse_arguments([*config, "--model_name", "other"])


def test_unknown_key_is_named_with_the_nearest_known_one(tmp_path):
    config = write(tmp_path, model_name_or_path="m", dataset_name="d", learning_rat=1e-3)
    with pytest.raises(RecipeError, match=r"learning_rat.*Did you mean learning_rate"):
        parse_arguments(config)


def test_unknown_flag_and_bad_value_are_errors():
    with pytest.raises(RecipeError, match="no_such_flag"):
        parse_arguments([*NEEDED, "--no_such_flag", "1"])
    with pytest.raises(RecipeError, match="max_steps"):
        parse_arguments([*NEEDED, "--max_steps", "many"])
    with pytest.raises(RecipeError, match="load_source"):
        parse_arguments([*NEEDED, "--load_source", "all"])


def test_missing_or_invalid_recipe_is_an_error(tmp_path):
    with pytest.raises(RecipeError, match=r"nothing\.yaml"):
        parse_arguments(["--config", "nothing.yaml"])
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(RecipeError):
        parse_arguments(["--config", str(tmp_path / "bad.yaml")])


def test_conflicting_arguments_are_refused_at_once(tmp_path):
    with pytest.raises(RecipeError, match="Set exactly one"):
        parse_arguments(["--dataset_name", "d"])
    with pytest.raises(DataError, match="there is no dataset"):
        parse_arguments(["--model_name_or_path", "m"])
    with pytest.raises(RecipeError, match="merge_adapter"):
        parse_arguments([*NEEDED, "--merge_adapter", "true"])
    with pytest.raises(DataError, match="validation_split_percentage"):
        parse_arguments([*NEEDED, "--validation_split_percentage", "100"])
    with pytest.raises(DataError, match="max_length"):
        parse_arguments([*write(tmp_path, max_length=None), *NEEDED, "--packing", "true"])


@pytest.mark.parametrize(
    ("kind", "kwargs", "says"),
    [
        ("linear", {"no_such": 1}, r"schedule linear does not accept: .*no_such"),
        ("cosine_with_min_lr", None, r"lr_scheduler_kwargs is None.*min_lr"),
        ("cosine", {"num_cycles": "many"}, r"num_cycles"),
        ("polynomial", {"lr_end": 1.0}, r"lr_end"),
    ],
)
def test_schedule_that_cannot_be_built_is_refused(tmp_path, kind, kwargs, says):
    config = write(tmp_path, lr_scheduler_type=kind, **({"lr_scheduler_kwargs": kwargs} if kwargs else {}))
    with pytest.raises(RecipeError, match=says):
        parse_arguments([*config, *NEEDED])


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        *((kind, None) for kind in ("linear", "cosine", "constant_with_warmup", "inverse_sqrt")),
        ("cosine_with_min_lr", {"min_lr": 1e-6}),
        ("warmup_stable_decay", {"num_decay_steps": 10}),
    ],
)
def test_schedule_that_can_be_built_passes(tmp_path, kind, kwargs):
    config = write(tmp_path, lr_scheduler_type=kind, **({"lr_scheduler_kwargs": kwargs} if kwargs else {}))
    assert parse_arguments([*config, *NEEDED]).training.lr_scheduler_kwargs == kwargs


def test_precision_follows_the_template(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert parse_arguments(NEEDED).training.bf16 is False


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_precision_that_the_launch_would_override_is_refused(name, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", name)
    other = {"bf16": "fp16", "fp16": "bf16"}[name]
    for arguments in ([*NEEDED, f"--{name}", "false"], [*write(tmp_path, **{name: False}), *NEEDED]):
        with pytest.raises(TemplateError, match=f"{name} is false, but the launch sets mixed_precision: {name}"):
            parse_arguments(arguments)
    assert parse_arguments([*NEEDED, f"--{other}", "false"]).training.mixed_precision == name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"dataset_name": "mine", "datasets": [{"path": "a"}]},
            "dataset_name is mine, but the recipe's datasets would be",
        ),
        ({"dataset_streaming": True, "datasets": [{"path": "a"}]}, "Set streaming instead"),
        ({"dataset_name": "mine", "streaming": True}, "Set dataset_streaming instead"),
        ({"dataset_name": "mine", "eval_packing": True}, "eval_packing: true needs packing: true"),
        ({"dataset_name": "mine", "adapter_dtype": "float32"}, "there is no adapter"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings, words, tmp_path):
    with pytest.raises(RecipeError, match=words):
        parse_arguments(write(tmp_path, model_name_or_path="m", **settings))


def test_revision_in_model_init_kwargs_is_used_for_the_tokenizer_and_merges_too(tmp_path):
    config = write(tmp_path, model_name_or_path="m", dataset_name="d", model_init_kwargs={"revision": "v1"})
    assert parse_arguments(config).model.model_revision == "v1"
    assert parse_arguments([*NEEDED, "--model_revision", "v2"]).model.model_revision == "v2"


def test_reference_models_and_adapters_get_the_models_revision():
    from trl import get_peft_config

    adapter = parse_arguments([*NEEDED, "--use_peft", "true", "--model_revision", "v2"])
    config = get_peft_config(adapter.model)
    build._pass_revision(adapter, config)
    assert config.revision == "v2" and adapter.training.model_init_kwargs is None
    rewards = ["--reward_model_name_or_path", "r", "--model_revision", "v2"]
    grpo = parse_arguments([*NEEDED, *rewards], trainer="grpo")
    build._pass_revision(grpo, None)
    assert grpo.training.model_init_kwargs == {"revision": "v2"}


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_adapter_dtype_works_without_fsdp(dtype, expected):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    dtypes.cast_trainable(model, None, dtype)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.bfloat16, expected)


def test_new_tokens_are_refused_if_the_merge_reads_the_base_models_files(tiny_model):
    from transformers import AutoConfig

    base = tiny_model("llama")
    config = AutoConfig.from_pretrained(base)
    build._check_embeddings(SimpleNamespace(config=config), base)
    config.vocab_size += 2
    with pytest.raises(ExportError, match="new tokens have changed the model's to"):
        build._check_embeddings(SimpleNamespace(config=config), base)


def test_run_is_named_like_the_log_files_of_the_amd_article(monkeypatch):
    date = datetime(2025, 2, 9, 14, 30)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    training = SimpleNamespace(max_steps=-1, num_train_epochs=1.0, per_device_train_batch_size=16)
    assert default_run_name(training, "meta-llama/Llama-2-7b-hf", date) == (
        "fsdp_training_20250209-1430_Llama-2-7b-hf_2_8_1_16"
    )
    training.max_steps = 48
    assert default_run_name(training, "runs/mine/").endswith("_mine_2_8_48steps_16")
