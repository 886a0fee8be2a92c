"""Decisions and failures of one rank reach all ranks."""

from tests.ranks.harness import run_ranks

VALUE = ["made on rank 0"] * 3
OURS = [("LoadError", "no such thing")] * 3
CASES = [  # how, which rank fails, with what kind of error, what each rank gets
    ("run_on_main", None, "ours", VALUE),
    ("run_on_main", 1, "ours", VALUE),  # only rank 0 does the work
    ("run_on_main", 0, "ours", OURS),
    ("run_on_main", 0, "foreign", [("UnexpectedError", "rank 0: KeyError: 'no such thing'")] * 3),
    ("sync_errors", 2, "ours", OURS),
    ("sync_errors", 2, "foreign", [("UnexpectedError", "rank 2: KeyError: 'no such thing'")] * 3),
]


def _outcomes():
    """Return what this rank got back or saw raised, case by case."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [_outcome(how, failing_rank, kind) for how, failing_rank, kind, _ in CASES]


def _outcome(how, failing_rank, kind):
    from hf_fsdp_recipes import distributed, errors

    def work():
        if distributed.rank() == failing_rank:
            raise {"ours": errors.LoadError, "foreign": KeyError}[kind]("no such thing")
        return f"made on rank {distributed.rank()}"

    try:
        if how == "run_on_main":
            return distributed.run_on_main(work)
        with distributed.sync_errors():
            return work()
    except Exception as error:
        return type(error).__name__, str(error)


def test_ranks_agree_on_what_happened():
    found = run_ranks(_outcomes, 3)
    for number, (how, failing_rank, kind, expected) in enumerate(CASES):
        assert [outcomes[number] for outcomes in found] == expected, (how, failing_rank, kind)


def timeouts_of_groups():
    """Return the timeouts in seconds of the default group and of a new group between hosts."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from hf_fsdp_recipes import distributed

    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    groups = (dist.group.WORLD, distributed.new_host_group())
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_group_between_hosts_has_the_timeout_of_the_run():
    assert run_ranks(timeouts_of_groups, 2) == [[77.0, 77.0]] * 2
