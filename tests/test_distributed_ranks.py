"""Decisions and failures of one rank reach all ranks."""

from tests.ranks.harness import run_ranks

VALUE = ["made on rank 0"] * 3
OURS = [("LoadError", "no such thing")] * 3
CASES = [  # function, failing rank, kind of error, result or error on each rank
    ("run_on_main", None, "ours", VALUE),
    ("run_on_main", 1, "ours", VALUE),  # only rank 0 does the work
    ("run_on_main", 0, "ours", OURS),
    ("run_on_main", 0, "foreign", [("UnexpectedError", "rank 0: KeyError: 'no such thing'")] * 3),
    ("sync_errors", 2, "ours", OURS),
    ("sync_errors", 2, "foreign", [("UnexpectedError", "rank 2: KeyError: 'no such thing'")] * 3),
]


def _outcomes():
    """Return this rank's result or error in each case."""
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
    """Return timeouts in seconds: the default group's, before and after setting it, and the patient group's."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from hf_fsdp_recipes import distributed

    def timeout(group):
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    before = timeout(dist.group.WORLD)
    distributed.set_timeout(33)
    return [before, timeout(dist.group.WORLD), timeout(distributed.patient_group()) > 1e6]


def test_timeouts_are_those_of_the_run():
    assert run_ranks(timeouts_of_groups, 2) == [[77.0, 33.0, True]] * 2


def work_beyond_the_timeout():
    """Work on one rank for longer than the timeout of collectives; return the result of each way of waiting."""
    import time
    from datetime import timedelta

    import torch.distributed as dist

    from hf_fsdp_recipes import distributed

    dist.init_process_group("gloo", timeout=timedelta(seconds=2))

    def work(slow_rank):
        time.sleep(3 if distributed.rank() == slow_rank else 0)
        return "done"

    results = [distributed.run_on_main(lambda: work(0), distributed.patient_group())]
    results.append(distributed.main_first(lambda: work(0)))
    with distributed.sync_errors(distributed.patient_group()):
        results.append(work(1))
    return results


def test_ranks_wait_for_work_that_takes_longer_than_the_timeout():
    assert run_ranks(work_beyond_the_timeout, 2) == [["done"] * 3] * 2
