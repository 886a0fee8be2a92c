"""Progress of long operations: how much of how much, how fast, how long still. On rank 0's terminal; silent elsewhere.

A thin name over tqdm, so that bars agree with Trainer's. Costs an addition an update: tqdm draws ten times a second at
most. Whoever turns off the bars of transformers or of the Hub turns off these.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from hf_fsdp_recipes import distributed

Item = TypeVar("Item")


def is_shown() -> bool:
    """Tell whether this process shows progress: rank 0, with a terminal, and nobody has turned bars off."""
    terminal = sys.__stderr__
    if terminal is None or terminal.closed or not terminal.isatty() or not distributed.is_main():
        return False
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    return logging.is_progress_bar_enabled() and not are_progress_bars_disabled()


def bar(total: float | None, title: str, unit: str = "B", **style: Any) -> Any:
    """Return a tqdm bar: `with bar(num_bytes, "load") as shown: shown.update(bucket_bytes)`. No collective.

    Args:
        total: what will be reached, or None where nobody knows.
        title: what is being done.
        unit: bytes, shown with their prefixes, or the name of what is counted.
        **style: further arguments of tqdm.
    """
    # Not sys.stderr: some callers hold that back to keep upstream's notes off the terminal.
    return tqdm(
        total=total,
        desc=title,
        unit=unit,
        unit_scale=unit == "B",
        disable=not is_shown(),
        file=sys.__stderr__,
        dynamic_ncols=True,
        **style,
    )


def in_words(num_bytes: int) -> str:
    """Return a number of bytes as the bars write it, `12.3MB`."""
    return f"{tqdm.format_sizeof(num_bytes)}B"


def each(items: Sequence[Item], title: str, unit: str = "B", sizes: Sequence[int] | None = None) -> Iterator[Item]:
    """Yield the items and show how far it is, by their sizes in bytes or, where those are not told, by their number."""
    steps = sizes or [1] * len(items)
    with bar(sum(steps), title, unit) as shown:
        for item, step in zip(items, steps, strict=True):
            yield item
            shown.update(step)


def say(line: str) -> None:
    """Print a line above the bars, where bars are shown. No collective."""
    if is_shown():
        tqdm.write(line, file=sys.__stderr__)


def print_above(line: str) -> None:
    """Print a line to standard output, above the bars where bars are shown. No collective."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
