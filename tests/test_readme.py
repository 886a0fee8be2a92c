"""Every README command runs here, in another test, or in `make quickstart`; the files that a contributor needs exist."""

import ast
import re
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from tests.recipes.launching import ROOT
from tests.test_pages import check_options

TEXT = (ROOT / "README.md").read_text()
RUN_ELSEWHERE = {
    "make quickstart": "the quickstart itself",
    "make test": "this very run, and .ci/run",
}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def commands(language):
    joined = "\n".join(blocks(language)).replace("\\\n", " ")
    return [re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines() if line.strip()]


def test_every_hf_fsdp_command_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = [command for command in commands("bash") if command.startswith("hf-fsdp")]
    assert len(found) >= 3
    for command in found:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, (command, result.output, result.exception)


def test_hf_fsdp_commands_that_need_a_run_have_the_options_that_are_shown():
    inline = [line for line in re.findall(r"`([^`\n]+)`", TEXT) if line.startswith("hf-fsdp ") and " -" in line]
    shown = [command for command in commands("text") if command.startswith("hf-fsdp")]
    assert inline and shown
    for command in shown + inline:
        check_options(shlex.split(command))


def test_every_other_command_is_one_that_something_runs():
    for command in commands("bash"):
        assert command in RUN_ELSEWHERE or command.startswith("hf-fsdp"), command


def test_continuous_integration_runs_the_test_command():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "make test" in commands("bash") and "make test || run_failed_again" in lines


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_launches_that_need_gpus_name_files_and_arguments_that_exist(monkeypatch, tmp_path):
    from hf_fsdp_recipes.training.arguments import parse_arguments

    monkeypatch.chdir(tmp_path)
    launches = [command for command in commands("text") if command.startswith("accelerate launch")]
    assert launches
    for command in launches:
        words = shlex.split(re.sub(r"\$\(hf-fsdp config path (\w+)\)", r"accelerate_configs/\1.yaml", command))
        template = ROOT / words[words.index("--config_file") + 1]
        assert yaml.safe_load(template.read_text())["distributed_type"] == "FSDP"
        [script] = [index for index, word in enumerate(words) if word.endswith(".py")]
        assert (ROOT / words[script]).is_file()
        if words[script] == "recipes/sft.py":
            parse_arguments([*words[script + 1 :], "--model_name_or_path", "some/model"])


def test_own_trainer_lines_use_public_names():
    import hf_fsdp_recipes

    [code] = blocks("python")
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    [names] = [node.names for node in imported if node.module == "hf_fsdp_recipes"]
    assert {name.name for name in names} <= set(hf_fsdp_recipes.__all__)


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_readme_is_short():
    assert len(TEXT.splitlines()) <= 150


def test_workflow_runs_the_same_script_as_everyone():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    [job] = workflow["jobs"].values()
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert "secrets." not in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.parametrize("hook", ["ruff-check", "ruff-format"])
def test_pre_commit_uses_the_projects_ruff(hook):
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {entry["id"]: entry for repository in config["repos"] for entry in repository["hooks"]}
    assert hooks[hook]["entry"].startswith(".venv/bin/ruff ")


def test_changelog_starts_with_unreleased_and_dates_every_release():
    from packaging.version import Version

    from hf_fsdp_recipes import __version__

    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:])
    latest = headings[1].split(" ")[0]
    assert Version(__version__) >= Version(latest), "the version lags behind the changelog"
