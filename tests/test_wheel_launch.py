"""The installed wheel does what the README shows, in an empty directory."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hf_fsdp_recipes", "recipes", "accelerate_configs")
PIP = [sys.executable, "-m", "pip"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return a wheel, built from a copy of the sources.

    So nothing else in the checkout gets into it.
    """
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.py", "setup.cfg", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        *PIP,
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(target),
        str(source),
    ]
    subprocess.run(command, check=True)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def hf_fsdp(wheel, tmp_path_factory):
    """Return a function that runs the installed command in an empty directory.

    The function returns what the command prints.
    """
    directory, empty = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("empty")
    venv.create(directory, with_pip=False)
    packages = next(directory.glob("lib/python3*/site-packages"))
    shared = [path for path in sys.path if path.endswith("site-packages")]  # all other packages
    (packages / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    install = [
        "--python",
        str(directory / "bin" / "python"),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*PIP, *install, "--ignore-installed", str(wheel)], check=True)

    def run(line: str) -> str:
        command = [str(directory / "bin" / "hf-fsdp"), *line.split()]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command,
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_wheel_holds_every_shipped_file_and_no_test(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in FOLDERS:
        files = [file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file()]
        inside = "" if folder == "hf_fsdp_recipes" else "hf_fsdp_recipes/"
        assert {f"{inside}{file}" for file in files if "__pycache__" not in file.parts} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_shipped_recipes_and_templates_are_found(hf_fsdp):
    assert "site-packages" in hf_fsdp("config path full_shard") and "smollm2_135m_lora" in hf_fsdp(
        "recipes list"
    )
    assert hf_fsdp("recipes show quickstart") == (ROOT / "recipes" / "quickstart.yaml").read_text()
    assert "hybrid_shard_zero2" in hf_fsdp("config list") and "--save_steps" in hf_fsdp(
        "quickstart --help"
    )


@pytest.mark.slow
def test_the_readmes_run_in_five_lines(hf_fsdp, tiny_model):
    fields = (
        f"--model_name_or_path {tiny_model('llama')} --max_steps 4 --save_steps 2 --report_to none"
    )
    hf_fsdp(
        "sft --accelerate_config cpu --main_process_port 0 --config quickstart "
        f"--output_dir runs/first {fields}"
    )
    assert [
        line.split()[0] for line in hf_fsdp("checkpoints runs/first --verify").splitlines()
    ] == ["step", "2", "4"]
    assert hf_fsdp("report runs/first") == "report: runs/first/report.md\n"
    assert hf_fsdp("export runs/first/checkpoint-4 out --merge-adapter") == "exported: out\n"
    assert hf_fsdp("generate runs/first/export --prompt fox") == hf_fsdp(
        "generate out --prompt fox"
    )
