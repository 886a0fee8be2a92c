"""The pages in docs/ and the table of recipes are complete, and commands name what exists."""

import re
import shlex

import pytest

from hf_fsdp_recipes.configs.shipped_files import find_file
from hf_fsdp_recipes.tools.launcher.command import SCRIPTS
from tests.recipes import small
from tests.recipes.launching import ROOT

SYSTEMS = ("llama2_70b_fsdp", "rocm_fsdp", "distributed_training_guide", "multinode_tutorial", "gaudi_fsdp")
PAGES = [ROOT / "docs" / f"{name}.md" for name in SYSTEMS]
OTHERS = [
    ROOT / name
    for name in (
        "CONTRIBUTING.md",
        "docs/README.md",
        "docs/concepts.md",
        "docs/trackers.md",
        "docs/why.md",
        "recipes/README.md",
    )
]


def commands(page):
    """Return the commands in a page's code blocks, without the prompt `$ `."""
    blocks = re.findall(r"```(?:bash|text)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.removeprefix("$ ") for line in lines]
    return [line for line in found if line.startswith(("accelerate launch", "hf-fsdp", "sbatch", "python -m"))]


def check_options(words):
    """Assert that the shown subcommand and options of `hf-fsdp` exist; options of `sft` may be fields of a recipe."""
    from typer.main import get_command

    from hf_fsdp_recipes.cli import app

    command, rest = get_command(app), words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for parameter in command.params for name in parameter.opts}
    if words[1] in SCRIPTS:
        check_launch(words[1], dict(zip(rest[::2], rest[1::2], strict=False)), rest)
        return
    assert {word for word in rest if word.startswith("-")} <= known, words


def check_launch(trainer, values, words):
    """Assert that a command of a trainer, such as `hf-fsdp sft`, names existing files and valid options or recipe fields."""
    from hf_fsdp_recipes.tools.launcher import launch
    from hf_fsdp_recipes.training.arguments import parse_arguments

    assert find_file("accelerate_configs", values["--accelerate_config"])
    options = launch.launch_command_parser()._option_string_actions
    known = {name for name, action in options.items() if action.dest not in launch.SHARED_OPTIONS}
    _, for_script = launch.split_arguments(words[words.index("--accelerate_config") + 2 :], known)
    if not values.get("--config", "").startswith("my_recipe"):
        parse_arguments(for_script, trainer)


def table_rows(file):
    return [line for line in file.read_text().splitlines() if line.startswith("| [")]


def test_every_recipe_is_listed_with_its_template():
    rows = table_rows(ROOT / "recipes" / "README.md")
    listed = {re.match(r"\| \[([^]]+)\]", row).group(1): row for row in rows}
    assert set(listed) == {recipe.name for recipe in small.all_recipes()}
    for recipe in small.all_recipes():
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


def test_each_point_of_the_five_documents_has_a_file_and_a_test_that_exist():
    section = (ROOT / "docs" / "README.md").read_text().split("## Where the five guides' content is", 1)[1]
    rows = [line for line in section.splitlines() if "::test_" in line]
    assert len(rows) >= 45
    for row in rows:
        [(file, name)] = re.findall(r"`([\w/]+\.py)::(test_\w+)` \|$", row)
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), row
        assert "](" in row, row


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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "trackers.md"], ids=lambda page: page.stem)
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
