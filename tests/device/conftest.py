"""The emulated accelerator: built once, then given to the fork server of this folder's tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.device.emulator.build import BuildError, build
from tests.device.ranks import Ranks, fork_server_with_device
from tests.device.runs import Inputs, Run, Runs


@pytest.fixture(scope="package")
def package() -> Path:
    """Return the built emulator.

    Without a compiler the tests are skipped, or fail under `make test-device`.
    """
    try:
        return build()
    except BuildError as error:
        if os.environ.get("REQUIRE_DEVICE"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def inputs(tiny_model: Any, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Return what all runs are trained on."""
    return Inputs(tiny_model, text_file, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="package")
def on_cpu(package: Path, inputs: Inputs) -> dict[str, Run]:
    """Return all cases, trained on CPU ranks before the fork server gets the device."""
    return inputs.train_on_cpu()


@pytest.fixture(scope="package")
def ranks(package: Path, on_cpu: dict[str, Run]) -> Iterator[Ranks]:
    """Return the object that starts ranks on the device."""
    with fork_server_with_device(package):
        yield Ranks(package)


@pytest.fixture(scope="package")
def runs(ranks: Ranks, inputs: Inputs, on_cpu: dict[str, Run]) -> Runs:
    """Return finished runs by name; each is trained once."""
    return Runs(ranks, inputs, on_cpu)
