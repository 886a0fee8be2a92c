"""The pages in docs/ and the table of recipes are complete, and commands name what exists."""

import re
import shlex

import pytest

from tests.recipes import small
from tests.recipes.launching import ROOT

SYSTEMS = ("llama2_70b_fsdp", "rocm_fsdp", "distributed_training_guide", "multinode_tutorial", "gaudi_fsdp")
PAGES = [ROOT / "docs" / f"{name}.md" for name in SYSTEMS]
OTHERS = [
    ROOT / name
    for name in ("CONTRIBUTING.md", "docs/README.md", "docs/concepts.md", "docs/why.md", "recipes/README.md")
]


def commands(page):
    """Return the commands in a page's blocks, the `$ ` of a shown session taken off."""
    blocks = re.findall(r"```(?:bash|text)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.removeprefix("$ ") for line in lines]
    return [line for line in found if line.startswith(("accelerate launch", "hf-fsdp", "sbatch", "python -m"))]


def check_options(words):
    """Assert that an `hf-fsdp` command has the subcommand and the options that are shown."""
    from typer.main import get_command

    from hf_fsdp_recipes.cli import app

    command, rest = get_command(app), words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in rest if word.startswith("-")} <= known, words


def table_rows(file):
    return [line for line in file.read_text().splitlines() if line.startswith("| [")]


def test_every_recipe_is_listed_with_its_template():
    rows = table_rows(ROOT / "recipes" / "README.md")
    listed = {re.match(r"\| \[([^]]+)\]", row).group(1): row for row in rows}
    assert set(listed) == {recipe.name for recipe in small.recipes()}
    for recipe in small.recipes():
        assert listed[recipe.name].endswith(f"| `{small.template_of(recipe).stem}` |"), recipe.name


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^):]+)\)", page.read_text())
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, link


def test_figures_quoted_in_why_are_measured():
    measured = (ROOT / "docs" / "measured.md").read_text()
    section = (ROOT / "docs" / "why.md").read_text().split("## Measured", 1)[1]
    cells = [line.split("|")[2:] for line in section.splitlines() if line.startswith("|")]
    figures = re.findall(r"\d[\d,]*\.?\d*", "\n".join(cell for row in cells for cell in row))
    assert len(figures) >= 10
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.])", measured), figure


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
    shown = [shlex.split(command) for command in commands(page) if command.startswith("hf-fsdp")]
    assert shown
    for words in shown:
        check_options(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_submitted_scripts_exist(page):
    for command in commands(page):
        if command.startswith("sbatch"):
            [script] = [
                word
                for word in shlex.split(command)
                if word.startswith("recipes/") and word.endswith((".slurm", ".sh"))
            ]
            assert (ROOT / script).is_file(), script
