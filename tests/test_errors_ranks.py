"""An error on one rank is an error on all of them, whatever its class needs."""

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import RecipeError
from tests.ranks.harness import run_ranks


class TwoWords(RecipeError):
    """An error of a user, whose constructor takes other arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def _fail_on(rank, kind, *words):
    from accelerate import PartialState

    PartialState(cpu=True)
    with distributed.agreed():
        if distributed.rank() == rank:
            raise kind(*words)


def test_all_ranks_raise_the_error_of_one():
    failed = run_ranks(_fail_on, 2, 1, ValueError, "no disk", expect_failure=True)
    assert failed == [("RecipeError", "rank 1: ValueError: no disk")] * 2


def test_a_class_with_another_constructor_ends_all_ranks_too():
    failed = run_ranks(_fail_on, 2, 1, TwoWords, "no", "disk", expect_failure=True)
    assert [name for name, _ in failed] == ["TypeError"] * 2
