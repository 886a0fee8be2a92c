"""setup.cfg allows, and the patches name, the versions that `make test-versions` tests."""

import configparser

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from hf_fsdp_recipes.upstream.versions import TESTED
from tests.versions.run import PACKAGES, ROOT


def read_versions(name):
    """Return the versions of a list by package, without the last number."""
    lines = (ROOT / "tests" / "versions" / f"{name}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    return {name: "{0.major}.{0.minor}".format(Version(pin)) for name, pin in pins.items()}


def test_the_lowest_versions_are_the_bounds_of_setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [
        *config["options"]["install_requires"].splitlines(),
        config["options.extras_require"]["qlora"],
    ]
    needs = [Requirement(line) for line in lines if line and not line.startswith("#")]
    bounds = {need.name: str(need.specifier).removeprefix(">=") for need in needs if need.specifier}
    assert bounds == read_versions("lowest")


def test_all_lists_name_the_same_packages():
    names = set(read_versions("newest"))
    assert names >= set(PACKAGES)
    assert set(read_versions("middle")) == names
    assert set(read_versions("lowest")) == names


@pytest.mark.parametrize("package", TESTED)
def test_errors_name_the_versions_tested(package):
    lowest = read_versions("lowest")[package]
    newest = read_versions("newest")[package]
    assert TESTED[package] == f"{lowest} to {newest}"
