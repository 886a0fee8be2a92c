"""Saving opens few sockets, so that a job of many ranks stays below the limit of open files."""

import contextlib
import os

from tests.saving.runs import on


def _count_sockets():
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count


def _note_sockets(trainer):
    on(trainer, "on_step_end", lambda state, control: trainer.notes.append(_count_sockets()))


def _most_sockets(run, output, num_ranks, stock):
    options = {"prepare": _note_sockets, "stock": stock}
    results = run(output / f"{num_ranks}-{stock}", num_ranks, **options)
    return max(max(result["notes"]) for result in results)


def test_each_more_rank_costs_at_most_two_more_sockets_than_with_stock_trainer(run, tmp_path):
    counts = {
        (num_ranks, stock): _most_sockets(run, tmp_path, num_ranks, stock)
        for num_ranks in (2, 4)
        for stock in (False, True)
    }
    with_ours = counts[4, False] - counts[2, False]
    with_stock = counts[4, True] - counts[2, True]
    assert with_ours <= with_stock + 2 * 2, counts
