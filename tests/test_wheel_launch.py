"""The wheel, built from the sdist and installed, does what the docs show, even in an empty directory."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from hf_fsdp_recipes.configs.templates import SHIPPED
from tests.recipes import small
from tests.recipes.launching import ROOT, environment

# The sources of an sdist; other files of the checkout, such as build/, must not get into it.
SOURCES = ("hf_fsdp_recipes", "recipes", "accelerate_configs", "setup.py", "setup.cfg", "MANIFEST.in")
TEXTS = ("README.md", "LICENSE", "CHANGELOG.md")
PIP = [sys.executable, "-m", "pip"]
# Stand-ins for Slurm's programs on one node.
SLURM = {
    "srun": 'while [[ $1 = --* ]]; do shift; done; SLURM_NODEID=0 exec "$@"',
    "scontrol": '[ "$2" = hostnames ] && echo localhost || echo "JobId=1 JobState=RUNNING Restarts=0 StdOut=/dev/null "',
}


def build_wheel(source, target):
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True)
    [wheel] = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    checkout = tmp_path_factory.mktemp("checkout")
    for name in SOURCES + TEXTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, checkout)
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist"], cwd=checkout, check=True, capture_output=True)
    [archive] = (checkout / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Build the wheel from the unpacked sdist."""
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    [source] = unpacked.iterdir()
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel into a new environment that shares this one's other packages; return its bin directory."""
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory, with_pip=False)
    [packages] = directory.glob("lib/python3*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    command = ["--python", str(directory / "bin" / "python"), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*PIP, *command, "--ignore-installed", str(wheel)], check=True)
    return directory / "bin"


@pytest.fixture
def run(installed, tmp_path):
    """Return a function that runs a program of the new environment in an empty directory."""
    (tmp_path / "empty").mkdir()

    def run_there(program, *arguments, status=0, timeout_seconds=150, **variables):
        path = f"{installed}:{os.environ['PATH']}"
        kept = {key: value for key, value in environment(PATH=path).items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [program, *map(str, arguments)],
            cwd=tmp_path / "empty",
            env=kept | variables,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status == 0 else done.stderr

    return run_there


def test_sdist_and_wheel_hold_every_shipped_file(sdist, wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("recipes", "accelerate_configs", "hf_fsdp_recipes"):
        files = [file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file()]
        files = [file for file in files if "__pycache__" not in file.parts]
        assert files and {str(file) for file in files} <= sources
        inside = "" if folder == "hf_fsdp_recipes" else "hf_fsdp_recipes/"
        assert {f"{inside}{file}" for file in files} <= names
    assert not [name for name in names | sources if name.startswith("tests")]


def test_the_wheel_is_imported_and_not_the_checkout(run, installed):
    code = (
        "import hf_fsdp_recipes.cli, sys; print(hf_fsdp_recipes.__file__, 'torch' in sys.modules, *sys.path, sep='\\n')"
    )
    package, has_torch, *path = run("python", "-c", code).splitlines()
    assert package.startswith(str(installed.parent)) and has_torch == "False" and str(ROOT) not in path
    assert "No module named 'tests'" in run("python", "-c", "import tests.recipes", status=1)


def test_recipes_are_listed_shown_and_copied(run, tmp_path):
    listed = run("hf-fsdp", "recipes", "list").splitlines()
    assert [line.split()[:2] for line in listed] == [
        [recipe.stem, small.template_of(recipe).stem] for recipe in small.all_recipes()
    ]
    assert all(len(line) > 60 for line in listed)
    recipe = ROOT / "recipes" / "llama2_70b_chat_full.yaml"
    assert run("hf-fsdp", "recipes", "show", recipe.stem) == recipe.read_text()
    run("hf-fsdp", "recipes", "copy", recipe.stem)
    copied = {str(file.relative_to(tmp_path / "empty")) for file in (tmp_path / "empty").rglob("*") if file.is_file()}
    assert copied == {"llama2_70b_chat_full.yaml", "chat_templates/prompter_assistant.jinja"}
    assert "exists" in run("hf-fsdp", "recipes", "copy", recipe.stem, status=1)


def test_templates_are_found_by_name_and_typos_name_the_closest(run):
    for name in SHIPPED:
        path = Path(run("hf-fsdp", "config", "path", name).strip())
        assert path.read_text() == (ROOT / "accelerate_configs" / f"{name}.yaml").read_text()
    assert "Similar names: fsdp2_full_shard" in run("hf-fsdp", "config", "path", "fsdp2_full_shrad", status=1)
    command = ("hf-fsdp", "sft", "--accelerate_config", "fsdp2_cpu", "--config")
    assert "Similar names: qwen3_8b_qlora, qwen3_8b_lora" in run(*command, "qwen3_8b_qlra", status=1)


def test_slurm_script_is_written_for_the_site(run, installed, tmp_path):
    script = tmp_path / "empty" / "launch.slurm"
    site = ("--partition", "gpu", "--account", "me", "--nodes", "2", "--gpus-per-node", "8")
    run("hf-fsdp", "slurm", "init", *site)
    run("bash", "-n", script)
    shipped = (ROOT / "recipes" / "launch.slurm").read_text()
    directives = re.findall("^#SBATCH (.*)", script.read_text(), flags=re.MULTILINE)
    given = ["--partition=gpu", "--account=me", "--nodes=2", "--gpus-per-node=8"]
    assert directives == given + re.findall("^#SBATCH (.*)", shipped, flags=re.MULTILINE)
    assert f"\nVENV=${{VENV:-{installed.parent}}}\n" in script.read_text()
    assert "exists" in run("hf-fsdp", "slurm", "init", *site, status=1)
    run("hf-fsdp", "slurm", "init", "--partition", "gpu", "--container", "nvcr.io#nvidia/x:1", "--output", "c.slurm")
    text = (tmp_path / "empty" / "c.slurm").read_text()
    assert "\nCONTAINER=${CONTAINER:-'nvcr.io#nvidia/x:1'}\n" in text and "\nVENV=${VENV:-.venv}\n" in text


def test_slurm_script_has_the_absolute_path_of_an_image_file(tmp_path, monkeypatch):
    """Pyxis treats a name without a slash as an image in a registry."""
    from hf_fsdp_recipes.tools.launcher.copies import render_slurm_script

    monkeypatch.chdir(tmp_path)
    (tmp_path / "img.sqsh").touch()
    for name in ("img.sqsh", "./img.sqsh", f"{tmp_path}/img.sqsh"):
        assert f"\nCONTAINER=${{CONTAINER:-{tmp_path}/img.sqsh}}\n" in render_slurm_script({}, name)
    assert "\nCONTAINER=${CONTAINER:-no.sqsh}\n" in render_slurm_script({}, "no.sqsh")


def test_quickstart_has_its_options(run):
    assert "--save_steps" in run("hf-fsdp", "quickstart", "--help")


def test_sft_starts_a_shipped_recipe(run, tmp_path):
    model = small.write_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "model")
    options = ("--num_processes", 1, "--main_process_port", 0, "--model_name_or_path", model, "--dry_run")
    said = run("hf-fsdp", "sft", "--accelerate_config", "fsdp2_cpu", "--config", "smollm2_135m_lora", *options)
    assert "nothing is loaded or trained" in said


@pytest.mark.slow
def test_written_slurm_script_trains_a_shipped_recipe(run, tmp_path):
    model = small.write_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "model")
    (tmp_path / "bin").mkdir()
    for name, script in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    run("hf-fsdp", "slurm", "init", "--partition", "cpu")
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "NPROC_PER_NODE": "2"}
    job |= {"TEMPLATE": "fsdp2_cpu", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    options = ("--model_name_or_path", model, "--max_steps", 3, "--report_to", "none")
    said = run("bash", "launch.slurm", "--config", "smollm2_135m_lora", *options, timeout_seconds=280, **job)
    assert "preflight passed" in said and said.splitlines()[-1].endswith(": completed")
    assert (tmp_path / "empty" / "runs" / "smollm2_135m_lora" / "export" / "adapter_model.safetensors").is_file()
