"""Every shipped recipe trains and exports in small, under the template that its first line names."""

import pytest

from hf_fsdp_recipes.tools.files import shipped_files
from tests.ranks.harness import read_losses, run_ranks, template_environment
from tests.recipes import small
from tests.recipes.launching import run_recipe

FAST = ("llama2_70b_size_wrap",)
RECIPES = [
    pytest.param(file, id=file.stem, marks=() if file.stem in FAST else pytest.mark.slow)
    for file in shipped_files("recipe")
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_and_exports_in_small(recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    assert f"--config {recipe.stem}" in recipe.read_text().splitlines()[0]
    compiler = (
        ["--torch_compile_backend", "eager"] if "gaudi" in recipe.stem else []
    )  # there is no Gaudi to compile for
    arguments = small.small_arguments(recipe, tmp_path, "--max_steps", "3", *compiler)
    environment = template_environment(small.template_of(recipe, tmp_path))
    run_ranks(run_recipe, 2, arguments, environment=environment, timeout_seconds=200)
    assert len(read_losses(tmp_path / "run")) == 3
    for export in (tmp_path / "run").glob("export*"):
        model = AutoModelForCausalLM.from_pretrained(export)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
