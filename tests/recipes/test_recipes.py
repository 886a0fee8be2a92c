"""Every shipped recipe: run with a tiny model on CPU ranks, and validated at full size without weights."""

import re

import pytest
import yaml

from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.tools.launcher.command import SCRIPTS
from tests.ranks.harness import printed_by, run_ranks, template_environment
from tests.recipes import small
from tests.recipes.launching import cpu_variant, run_recipe

# What differs on two CPU ranks with a tiny model: length, steps, and what needs an accelerator.
ON_CPU = {
    "attention": "auto",
    "bf16": False,
    "torch_compile": False,
    "compile_blocks": False,
    "dataloader_num_workers": 0,  # the tests' ranks are daemons, which may not have children
    "push_to_hub": False,
    "max_length": 256,  # alpaca prompts are long in a vocabulary of 300
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "save_steps": 2,
    "eval_steps": 2,
    "eval_delay": 0,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
SMALL_LLAMA = "num_hidden_layers=2,hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=4"
CHANGES = {
    "c4_150m_pretrain": {"config_overrides": f"{SMALL_LLAMA},vocab_size=320"},
}


def small_variant(recipe, tmp_path):
    """Return a recipe's settings for CPU ranks; whatever is not named in ON_CPU stays as shipped."""
    settings = read_recipe(recipe)
    changes = {
        key: value for key, value in ON_CPU.items() if key in settings or key.startswith(("max_", "use_", "report"))
    }
    for key in ("bf16", "torch_compile", "attention", "disable_tqdm", "logging_steps"):
        changes[key] = ON_CPU[key]
    settings |= changes | CHANGES.get(recipe.stem, {})
    settings.pop("torch_compile_backend", None)
    if settings.get("eval_strategy") == "epoch":
        settings["eval_strategy"] = "steps"
        settings["eval_steps"] = 2
    if recipe.stem == "quickstart":
        settings["model_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    if "model_name_or_path" in settings:
        settings["model_name_or_path"] = str(small.write_model(settings["model_name_or_path"], tmp_path / "model"))
    else:
        settings["tokenizer_name"] = str(small.write_model("meta-llama/Llama-2-7b-hf", tmp_path / "model"))
    settings["dataset_name"] = str(small.write_rows(settings["dataset_name"], tmp_path / "rows"))
    settings.pop("dataset_config", None)
    if settings.get("dtype") == "bfloat16" and not settings.get("load_in_4bit"):
        settings["dtype"] = "float32"  # without bf16 autocast the CPU ranks compute in one dtype
    return settings | {"output_dir": str(tmp_path / "run")}


# What `make test` runs; `make test-all` runs the other recipes too.
TRAINED_ALWAYS = ("llama3_8b_full", "qwen3_8b_lora_80gb", "qwen3_30b_a3b_lora", "gpt_oss_20b_lora")
PLANNED_ALWAYS = (
    "quickstart",
    "c4_150m_pretrain",
    "gpt2_alpaca_offload",
    "llama2_70b_size_wrap",
)


def parametrized(always):
    """Return all recipes as parameters; mark those that are not in `always` as slow."""
    marked = [(file, () if file.stem in always else pytest.mark.slow) for file in small.recipes()]
    return pytest.mark.parametrize("recipe", [pytest.param(file, id=file.stem, marks=marks) for file, marks in marked])


@parametrized(TRAINED_ALWAYS)
def test_recipe_trains_and_exports_on_cpu_ranks(recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    settings = small_variant(recipe, tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    template, num_ranks, _ = cpu_variant(small.template_of(recipe), tmp_path / "template.yaml")
    environment = template_environment(template)
    run_ranks(run_recipe, num_ranks, ["--config", str(file)], environment=environment, timeout_seconds=180)
    exports = ["export", *(["export_merged"] if settings.get("merge_adapter") else [])]
    for export in exports:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / export)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert metrics.count('"loss"') >= 3


@parametrized(PLANNED_ALWAYS)
def test_recipe_is_valid_at_full_size(recipe, tmp_path):
    """`--dry_run` without the Hub: template, batches and memory of the shipped config, without weights."""
    settings = read_recipe(recipe)
    arguments = ["--config", recipe, "--dry_run", "--output_dir", tmp_path / "run"]
    if not {"config_name", "model_name_or_path"} & settings.keys():
        arguments += ["--model_name_or_path", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    [said] = run_ranks(
        printed_by,
        1,
        run_recipe,
        arguments,
        environment=template_environment(small.template_of(recipe)),
        timeout_seconds=240,
    )
    assert "nothing is loaded or trained" in said
    assert ("config_name" in settings) != ("so the copy shipped with hf-fsdp is used" in said)
    assert settings.get("push_to_hub", False) == ("note: push_to_hub is on, but HF_HUB_OFFLINE is set." in said)
    assert f"batch: {settings['per_device_train_batch_size']} rows x" in said
    assert "memory per rank" in said and "parameters" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", small.all_recipes(), ids=lambda file: file.stem)
def test_recipe_begins_with_its_command(recipe):
    first = recipe.read_text().splitlines()[0]
    assert re.match(rf"# hf-fsdp ({'|'.join(SCRIPTS)}) --accelerate_config ", first)
    assert f"--config {recipe.stem}" in first
    assert small.template_of(recipe).is_file()
