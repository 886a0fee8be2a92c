"""What a recipe's first comment says about its size is what its settings give."""

import re

import pytest

from benchmarks.recipes import find_facts
from hf_fsdp_recipes.tools.files import shipped_files


@pytest.mark.parametrize("recipe", shipped_files("recipe"), ids=lambda file: file.stem)
def test_a_recipe_says_how_long_it_trains_and_logs_losses(recipe):
    comment = re.sub(r"\n#? ?", " ", recipe.read_text().partition("\n\n")[0])
    facts = find_facts(recipe)
    assert f" {facts[0]}" in comment
    for found in facts:
        assert f"{found.steps:,} steps, {found.time} on {found.devices}" in comment
        assert found.num_losses >= 10, "too few losses to see whether it learns"
