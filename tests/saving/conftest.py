"""What the checkpointing tests share: ranks that train under FSDP2, with DDP, or one process."""

import functools

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks
from tests.saving.runs import train

ON_CPU = {"ACCELERATE_USE_CPU": "true"}
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How many ranks a world has, unless a test says it.
RANKS = {"fsdp": 2, "full state": 2, "ddp": 2, "one": 1}


@pytest.fixture(scope="session")
def worlds():
    """Return the environment of the ranks in each world.

    "fsdp" saves sharded state, "full state" is FSDP that gathers its state on rank 0, and "one" is
    a process that no launcher has started, without a process group.
    """
    return {
        "fsdp": fsdp_environment(FSDP2),
        "full state": fsdp_environment(FSDP2 | {"fsdp_state_dict_type": "FULL_STATE_DICT"}),
        "ddp": ON_CPU,
        "one": ON_CPU | dict.fromkeys(LAUNCHER),
    }


@pytest.fixture(scope="session")
def fsdp(worlds):
    """Return the environment of the ranks under FSDP."""
    return worlds["fsdp"]


@pytest.fixture(scope="session")
def run(worlds):
    """Return a function that calls `function` on ranks. It returns each rank's result or error."""

    def run_on_ranks(
        output, world_size=None, *, world="fsdp", function=train, expect_failure=False, **options
    ):
        return run_ranks(
            functools.partial(function, output, **options),
            world_size or RANKS[world],
            environment=worlds[world],
            timeout_seconds=200,
            expect_failure=expect_failure,
        )

    return run_on_ranks
