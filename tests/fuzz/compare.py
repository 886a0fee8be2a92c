"""Compares what the two sides did in one call."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.fuzz.files import Files
from tests.fuzz.session import RETURNED, Step

# Ours adds these to checkpoints and exports. Under FSDP, stock writes no description of the model.
ADDED = (
    "manifest.json",
    "run.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
)
MAX_LENGTH = 700


@dataclass
class Difference:
    """One difference.

    Args:
        kind: what differs, without numbers. Differences of one kind are one class.
        stock: what stock did.
        ours: what this package did.
        call: the call that differs.
        announced: the sentence that announces the difference, if any.
    """

    kind: str
    stock: str
    ours: str
    call: str = ""
    announced: str | None = None


def compare_steps(stock: Step, ours: Step) -> Iterator[Difference]:
    """Yield all differences of a call, the most important ones first."""
    if stock.outcome != ours.outcome:
        left = [stock.outcome, stock.value]
        yield difference(f"outcome of {ours.name}", left, [ours.outcome, ours.value])
    elif stock.value != ours.value:
        what = "result" if ours.outcome == RETURNED else "message"
        yield difference(f"{what} of {ours.name}", stock.value, ours.value)
    if stock.other_ranks != ours.other_ranks:
        yield difference("outcomes of other ranks", stock.other_ranks, ours.other_ranks)
    yield from compare_events(stock.events, ours.events)
    for name in sorted(stock.facts.keys() | ours.facts.keys()):
        left = stock.facts.get(name)
        right = ours.facts.get(name)
        # Models of load_model have no weights before Trainer prepares them.
        if left != right and (name != "weights" or right is not None):
            yield difference(name, *first_difference(left, right))
    yield from compare_files(stock.files, ours.files)


def compare_events(stock: list[Any], ours: list[Any]) -> Iterator[Difference]:
    pairs = zip(stock, ours, strict=False)
    differing = (number for number, (left, right) in enumerate(pairs) if left != right)
    first = next(differing, min(len(stock), len(ours)))
    names = [[event for event, _ in events] for events in (stock, ours)]
    if stock == ours:
        return
    kind = "events"
    if names[0] == names[1]:
        event, facts = stock[first]
        differing_facts = [name for name in facts if facts[name] != ours[first][1].get(name)]
        kind = f"what {event} sees: {', '.join(differing_facts)}"
    yield difference(kind, stock[first : first + 3], ours[first : first + 3])


def compare_files(stock: Files, ours: Files) -> Iterator[Difference]:
    for directory in sorted(stock.keys() - ours.keys()):
        yield difference(f"missing {generic(directory)}", directory, sorted(ours))
    for directory in sorted(ours.keys() - stock.keys()):
        yield difference(f"extra {generic(directory)}", sorted(stock), directory)
    for directory in sorted(stock.keys() & ours.keys()):
        yield from compare_directory(directory, stock[directory], ours[directory])


def compare_directory(
    directory: str, stock: dict[str, Any], ours: dict[str, Any]
) -> Iterator[Difference]:
    for name in sorted(stock.keys() - ours.keys()):
        yield difference(f"missing file {generic(name)}", f"{directory}/{name}", sorted(ours))
    for name in sorted(ours.keys() - stock.keys()):
        if name not in ADDED:
            yield difference(f"extra file {generic(name)}", sorted(stock), f"{directory}/{name}")
    for name in sorted(stock.keys() & ours.keys()):
        if stock[name] != ours[name]:
            left, right = first_difference(stock[name], ours[name])
            kind = f"contents of {generic(name)}"
            if name == "trainer_state.json":
                kind += f": {left.partition(':')[0].partition('/')[0]}"
            yield difference(kind, f"{directory}/{name}: {left}", f"{directory}/{name}: {right}")


def first_difference(stock: Any, ours: Any, path: str = "") -> tuple[str, str]:
    """Return the first parts of two structures that differ, each with its place."""
    if isinstance(stock, list) and isinstance(ours, list) and len(stock) == len(ours):
        return first_difference(dict(enumerate(stock)), dict(enumerate(ours)), path)
    if isinstance(stock, dict) and isinstance(ours, dict):
        for key in sorted(stock.keys() | ours.keys(), key=str):
            if stock.get(key) != ours.get(key):
                inner = f"{path}/{key}".strip("/")
                return first_difference(stock.get(key), ours.get(key), inner)
    return f"{path}: {stock}", f"{path}: {ours}"


def difference(kind: str, stock: Any, ours: Any) -> Difference:
    return Difference(kind, short(stock), short(ours))


def generic(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) < MAX_LENGTH else text[:MAX_LENGTH] + " ..."
