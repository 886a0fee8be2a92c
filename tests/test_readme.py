"""The README's commands: each is run here, by another test, or by `make quickstart`."""

import re
import shlex
import subprocess
import sys

import yaml

from tests.recipes.launching import ROOT

TEXT = (ROOT / "README.md").read_text()
RUN_ELSEWHERE = {
    "make quickstart": "the quickstart itself",
    "make test": "this very run",
    "make lint": ".ci/run",
    "make test-all": "the same runner with the slow proofs",
    "make rehearse-all": "the rehearsals",
    "make test-slurm": "tests/slurm",
    "make bench": "the benchmarks",
}


def commands(language):
    blocks = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines() if line.strip()]


def test_every_hf_fsdp_command_runs():
    found = [command for command in commands("bash") if command.startswith("hf-fsdp")]
    assert len(found) >= 3
    for command in found:
        code = "from hf_fsdp_recipes.cli import main; main()"
        arguments = [sys.executable, "-c", code, *shlex.split(command)[1:]]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)


def test_every_other_command_is_one_that_something_runs():
    for command in commands("bash"):
        known = command in RUN_ELSEWHERE or command.startswith(
            ("hf-fsdp", "accelerate launch --config_file accelerate_configs/fsdp2_cpu")
        )
        assert known, command


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_launches_that_need_gpus_name_files_and_arguments_that_exist(monkeypatch, tmp_path):
    from hf_fsdp_recipes.training.arguments import parse_arguments

    monkeypatch.chdir(tmp_path)
    launches = [command for command in commands("text") + commands("bash") if command.startswith("accelerate launch")]
    assert len(launches) == 3
    for command in launches:
        words = shlex.split(command.replace("$", ""))
        template = ROOT / words[words.index("--config_file") + 1]
        assert yaml.safe_load(template.read_text())["distributed_type"] == "FSDP"
        script = words.index("recipes/sft.py")
        arguments = [str(ROOT / word) if word.startswith("recipes/") else word for word in words[script + 1 :]]
        if "my_recipe.yaml" not in arguments:
            parse_arguments(arguments)


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link
