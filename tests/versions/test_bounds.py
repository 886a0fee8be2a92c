"""setup.cfg and the patches name exactly the versions that `make test-versions` tests."""

import configparser

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from hf_fsdp_recipes.patches.registry import TESTED_VERSIONS, versions_of
from tests.recipes.launching import ROOT
from tests.versions.run import PACKAGES

BOUNDED_ABOVE = ["torch", "accelerate", "transformers", "trl", "peft"]


def pins(name):
    lines = (ROOT / "tests" / "versions" / f"{name}.txt").read_text().splitlines()
    return {package: Version(version) for package, version in (line.split("==") for line in lines if "==" in line)}


def bounds():
    """Return each package's lower and upper bound."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    lines = "\n".join((config["options"]["install_requires"], extras["qlora"], extras["mirror"])).splitlines()
    found = {}
    for requirement in map(Requirement, filter(None, lines)):
        versions = {specifier.operator: specifier.version for specifier in requirement.specifier}
        found[requirement.name] = versions.get(">="), versions.get("<")
    return found


def minor(version):
    return f"{version.major}.{version.minor}"


@pytest.mark.parametrize("package", pins("lowest"))
def test_lower_bound_is_the_lowest_version_tested(package):
    version = pins("lowest")[package]
    assert bounds()[package][0] == minor(version)
    assert version.micro == 0


@pytest.mark.parametrize("package", BOUNDED_ABOVE)
def test_upper_bound_is_the_minor_release_after_the_newest_tested(package):
    version = pins("newest")[package]
    assert bounds()[package][1] == f"{version.major}.{version.minor + 1}"


def test_both_environments_pin_every_package_of_the_table():
    assert set(PACKAGES) <= set(pins("lowest")) == set(pins("newest"))


@pytest.mark.parametrize("package", TESTED_VERSIONS)
def test_patches_name_the_versions_tested(package):
    oldest, newest = (minor(pins(name)[package]) for name in ("lowest", "newest"))
    assert versions_of(package) == f"{package} {oldest}" + ("" if oldest == newest else f" to {newest}")
