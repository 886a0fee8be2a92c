"""Rows of random tokens and different lengths, ready for the trainer."""

import random
from typing import Any

from tests.oracle.cases import Case

MAX_LENGTH = 48
MIN_ROWS = 32
TOKENS = (10, 110)  # lowest and highest
EVAL_BATCH = 2


def num_rows(case: Case) -> int:
    """Return the number of rows that the steps need. Packing makes one row of several."""
    needed = case.num_steps * case.accumulate * case.num_ranks * case.batch
    return max(MIN_ROWS, needed * (4 if case.packing else 1))


def num_eval_rows(case: Case) -> int:
    return 2 * EVAL_BATCH * case.num_ranks


def make_rows(case: Case) -> list[dict[str, Any]]:
    numbers = random.Random(0)
    longest = 60 if case.packing else 40  # packing cuts or splits rows
    rows = []
    for index in range(num_rows(case)):
        length = numbers.randint(6, longest)
        tokens = [numbers.randint(*TOKENS) for _ in range(length)]
        batch = index // case.batch
        if case.family == "branching":  # two ranks use different experts, and exchange them
            tokens[0] = TOKENS[0] + (batch + batch // 2) % 2
        row = {"input_ids": tokens} | masks(case, batch, length)
        if case.kind == "score":
            row["labels"] = numbers.randint(0, 2)
        if case.is_plain:
            row["attention_mask"] = [1] * length
        rows.append(row)
    return rows


def masks(case: Case, batch: int, length: int) -> dict[str, list[int]]:
    """Return the masks of a row of a micro-batch, which say what tokens count for the loss."""
    found = {}
    if case.completion:
        found["completion_mask"] = [int(index >= length // 2) for index in range(length)]
    if case.empty:
        found["completion_mask"] = [int(batch % 3 != 1)] * length
    if case.assistant:  # two turns
        found["assistant_masks"] = [int(index % 6 >= 3) for index in range(length)]
    return found
