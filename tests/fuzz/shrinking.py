"""Shrinks a combination while a difference remains."""

import copy
import time
from typing import Any

from tests.fuzz.combinations import FEWER_RANKS, Case
from tests.fuzz.compare import Difference
from tests.fuzz.driver import Fuzzer

LISTS = ("actors", "before", "after")
# The keys that lead to something that can be dropped. The last one may be an index.
Part = tuple[Any, ...]


def surprises(differences: list[Difference]) -> list[Difference]:
    """Return the differences that are not announced."""
    return [found for found in differences if found.announced is None]


def kinds_of(differences: list[Difference]) -> list[str]:
    return list(dict.fromkeys(found.kind for found in differences))


class Shrinker:
    """Finds a small combination that has a difference of a kind, which is not announced.

    Args:
        fuzzer: runs combinations.
        kind: the kind.
        seconds: how long to search.

    Attributes:
        case: the smallest combination so far.
        differences: those of `case` that are not announced.
    """

    def __init__(self, fuzzer: Fuzzer, kind: str, seconds: float) -> None:
        self._fuzzer = fuzzer
        self._kind = kind
        self._deadline = time.monotonic() + seconds
        self.case: Case = {}
        self.differences: list[Difference] = []

    def shrink(self, case: Case) -> None:
        """Drop parts: first half of them at once, in the end one at a time."""
        if not self._attempt(case):
            return
        self._attempt(case | {"world": FEWER_RANKS.get(case["world"], case["world"])})
        size = len(parts_of(self.case))
        while size > 1:
            size = (size + 1) // 2
            self._drop(size)

    def _drop(self, size: int) -> None:
        first = 0
        while first < len(parts := parts_of(self.case)):
            if not self._attempt(without(self.case, parts[first : first + size])):
                first += size

    def _attempt(self, case: Case) -> bool:
        """Keep a combination if it has the difference."""
        if case == self.case or time.monotonic() > self._deadline:
            return False
        differences = surprises(self._fuzzer.run(case))
        is_found = self._kind in kinds_of(differences)
        if is_found:
            self.case = case
            self.differences = differences
        return is_found


def parts_of(case: Case) -> list[Part]:
    """Return all that can be dropped: options, entries of lists, changes of the second session."""
    parts: list[Part] = [(name,) for name in case if name != "world"]
    parts += [(name, index) for name in LISTS for index in range(len(case.get(name, [])))]
    changes = case.get("second", {}).get("args", {})
    return parts + [("second", "args", name) for name in changes]


def without(case: Case, parts: list[Part]) -> Case:
    """Return a combination without some parts."""
    smaller = copy.deepcopy(case)
    for part in parts:
        *keys, last = part
        holder: Any = smaller
        for key in keys:
            holder = holder.get(key, {})
        if isinstance(holder, list):
            holder[last] = None  # keeps the indices of the others
        else:
            holder.pop(last, None)
    for name in LISTS:
        if name in smaller:
            smaller[name] = [entry for entry in smaller[name] if entry is not None]
    return {name: value for name, value in smaller.items() if name not in LISTS or value}
