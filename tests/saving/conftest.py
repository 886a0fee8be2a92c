"""What the checkpointing tests share: ranks that train under FSDP2 with sharded state."""

import functools

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.saving.runs import train


@pytest.fixture(scope="session")
def fsdp():
    """Return the environment of the ranks."""
    return fsdp_environment(FSDP2)


@pytest.fixture(scope="session")
def run(fsdp):
    """Return a function that calls `function` on ranks. It returns each rank's result or error."""

    def run_on_ranks(output, world_size=2, *, function=train, expect_failure=False, **options):
        call = functools.partial(function, output, **options)
        return run_ranks(
            call, world_size, environment=fsdp, timeout_seconds=200, expect_failure=expect_failure
        )

    return run_on_ranks
