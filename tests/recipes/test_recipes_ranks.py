"""Every shipped recipe trains, resumes and exports in small.

It does so with the template and the precision of its own command.
"""

import shutil

import pytest

from hf_fsdp_recipes.tools.files import shipped_files
from tests.ranks.harness import read_losses, run_ranks
from tests.recipes import small
from tests.recipes.launching import run_recipe

# In small, each of them is like another recipe.
SIMILAR = {
    "llama2_70b_alpaca_full",
    "llama2_70b_chat_full",
    "llama2_70b_lora_gaudi",
    "llama2_7b_alpaca_full",
    "llama2_7b_size_wrap",
    "llama3_70b_qlora",
    "llama3_8b_full",
    "qwen3_8b_lora",
    "smollm2_135m_full",
}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(file, marks=[pytest.mark.slow] if file.stem in SIMILAR else [], id=file.stem)
        for file in shipped_files("recipe")
    ],
)
def test_recipe_trains_resumes_exactly_and_exports_in_small(recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    words = small.command_of(recipe)
    assert words[words.index("--config") + 1] == recipe.stem
    precision = "no" if "cpu" in words or "--mixed_precision" in words else "bf16"
    fields = [
        "--max_steps",
        "4",
        "--gradient_accumulation_steps",
        "2",
        "--bf16",
        str(precision == "bf16"),
    ]
    # No Gaudi to compile for.
    fields += ["--torch_compile_backend", "eager"] if "gaudi" in recipe.stem else []
    arguments = small.small_arguments(recipe, tmp_path, *fields)
    environment = small.environment_of(recipe) | {"ACCELERATE_MIXED_PRECISION": precision}
    run_ranks(run_recipe, 2, arguments, environment=environment, timeout_seconds=200)
    whole, last = read_losses(tmp_path / "run"), tmp_path / "run" / "checkpoint-4"
    assert len(whole) == 4
    shutil.rmtree(last)
    run_ranks(run_recipe, 2, arguments, environment=environment, timeout_seconds=200)
    assert last.is_dir() and read_losses(tmp_path / "run") == whole
    for export in (tmp_path / "run").glob("export*"):
        model = AutoModelForCausalLM.from_pretrained(export)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
