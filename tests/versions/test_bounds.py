"""What setup.cfg allows and what errors name are the versions that `make test-versions` tests."""

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
    return {
        package: "{0.major}.{0.minor}".format(Version(version)) for package, version in pins.items()
    }


def test_the_lowest_versions_are_the_bounds_of_setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [
        *config["options"]["install_requires"].splitlines(),
        config["options.extras_require"]["qlora"],
    ]
    needed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    bounds = {one.name: str(one.specifier).removeprefix(">=") for one in needed if one.specifier}
    assert bounds == read_versions("lowest")


def test_all_lists_name_the_same_packages():
    assert (
        set(read_versions("lowest"))
        == set(read_versions("middle"))
        == set(read_versions("newest"))
        >= set(PACKAGES)
    )


@pytest.mark.parametrize("package", TESTED)
def test_errors_name_the_versions_tested(package):
    lowest, newest = read_versions("lowest")[package], read_versions("newest")[package]
    assert TESTED[package] == f"{lowest} to {newest}"
