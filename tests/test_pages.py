"""The pages on published systems and the tables of recipes: nothing is forgotten, and commands name what exists."""

import re
import shlex

import pytest

from tests.recipes import small
from tests.recipes.launching import ROOT

SYSTEMS = ("llama2_70b_fsdp", "rocm_fsdp", "distributed_training_guide", "multinode_tutorial", "gaudi_fsdp")
PAGES = [ROOT / "docs" / f"{name}.md" for name in SYSTEMS]
INDEXES = [ROOT / "docs" / "README.md", ROOT / "recipes" / "README.md"]


def commands(page):
    """Return the commands in a page's blocks, the `$ ` of a shown session taken off."""
    blocks = re.findall(r"```(?:bash|text)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.removeprefix("$ ") for line in lines]
    return [line for line in found if line.startswith(("accelerate launch", "hf-fsdp", "sbatch", "python -m"))]


def table_rows(file):
    return [line for line in file.read_text().splitlines() if line.startswith("| [")]


def test_every_recipe_is_listed_with_its_template():
    rows = table_rows(ROOT / "recipes" / "README.md")
    listed = {re.match(r"\| \[([^]]+)\]", row).group(1): row for row in rows}
    assert set(listed) == {recipe.name for recipe in small.recipes()}
    for recipe in small.recipes():
        assert f"| `{small.template_of(recipe).stem}` | yes |" in listed[recipe.name], recipe.name


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


@pytest.mark.parametrize("page", [*PAGES, *INDEXES], ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert links
    for link in links:
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_launches_name_files_and_arguments_that_exist(page, monkeypatch):
    from hf_fsdp_recipes.training.arguments import parse_arguments

    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    launches = [shlex.split(command) for command in commands(page) if command.startswith("accelerate launch")]
    assert launches
    for words in launches:
        template = words[words.index("--config_file") + 1]
        assert (ROOT / template).is_file() or template.startswith("runs/"), template
        parse_arguments(words[words.index("recipes/sft.py") + 1 :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_hf_fsdp_commands_have_the_options_that_are_shown(page):
    from typer.main import get_command

    from hf_fsdp_recipes.cli import app

    shown = [shlex.split(command) for command in commands(page) if command.startswith("hf-fsdp")]
    assert shown
    for words in shown:
        command, rest = get_command(app), words[1:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in rest if word.startswith("-")} <= known, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_that_are_submitted_exist(page):
    for command in commands(page):
        if command.startswith("sbatch"):
            [script] = [
                word
                for word in shlex.split(command)
                if word.startswith("recipes/") and word.endswith((".slurm", ".sh"))
            ]
            assert (ROOT / script).is_file(), script
