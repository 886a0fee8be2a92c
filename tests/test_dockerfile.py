"""The Dockerfile parses, copies what a wheel is built from, and pins the torch that the Makefile installs."""

import json
import re
import shlex
import subprocess

import pytest

from tests.recipes.launching import ROOT

# Base images with a documented name: Docker's official Python image, and the image that AMD's ROCm documentation names.
BASES = {"python:3.12-slim", "rocm/pytorch:latest"}
KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "CMD"}


@pytest.fixture(scope="module")
def instructions():
    """The instructions and their arguments, in order."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def arguments(instructions, name):
    return [text for instruction, text in instructions if instruction == name]


def test_every_instruction_is_known_and_the_base_is_a_documented_image(instructions):
    assert {name for name, _ in instructions} <= KNOWN
    names = [name for name, _ in instructions if name != "ARG"]
    assert names[0] == "FROM" and names.count("FROM") == 1 and names[-1] == "CMD"
    assert arguments(instructions, "FROM") == ["${BASE}"]
    text = (ROOT / "Dockerfile").read_text()
    assert set(re.findall(r"BASE=(\S+)", text)) == BASES
    assert json.loads(arguments(instructions, "CMD")[0])[0] == "hf-fsdp"


def test_every_variable_is_an_argument_that_is_declared_before(instructions):
    declared = set()
    for name, text in instructions:
        if name == "ARG":
            declared.add(text.partition("=")[0])
        else:
            assert set(re.findall(r"\$\{(\w+)\}", text)) <= declared, text


def test_commands_are_valid_shell_and_packages_of_apt_are_listed_once(instructions):
    for command in arguments(instructions, "RUN"):
        assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0, command
    [apt] = [command for command in arguments(instructions, "RUN") if "apt-get" in command]
    packages = [word for word in shlex.split(apt.split("install")[1].split("&&")[0]) if not word.startswith("-")]
    assert packages == sorted(set(packages))


def test_image_has_the_sources_of_the_package_where_the_kubernetes_example_looks(instructions):
    copied = [word for text in arguments(instructions, "COPY") for word in text.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"setup.cfg", "setup.py", "MANIFEST.in", "hf_fsdp_recipes", "recipes", "accelerate_configs"} <= set(copied)
    [directory] = arguments(instructions, "WORKDIR")
    assert f"checkout at {directory} " in (ROOT / "recipes" / "kubernetes.yaml").read_text()


def test_torch_and_extras_are_those_of_the_project(instructions):
    from configparser import ConfigParser

    given = dict(text.split("=", 1) for text in arguments(instructions, "ARG"))
    version = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE).group(1)
    assert given["TORCH"] == f"torch=={version}"
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert set(given["EXTRAS"].split(",")) <= set(setup["options.extras_require"])
