"""Shows progress bars on rank 0's terminal, and nothing on other ranks or without a terminal.

The bars are tqdm's, so that they look like Trainer's. A user who turns off the bars of transformers or of
huggingface_hub sees none of these bars either.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from hf_fsdp_recipes import distributed

Item = TypeVar("Item")


def is_shown() -> bool:
    """Return whether this process shows progress bars: it is rank 0, has a terminal, and bars are enabled."""
    terminal = sys.__stderr__
    if terminal is None or terminal.closed or not terminal.isatty() or not distributed.is_main():
        return False
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    return logging.is_progress_bar_enabled() and not are_progress_bars_disabled()


def bar(total: float | None, title: str, unit: str = "B", **style: Any) -> tqdm:
    """Return a tqdm bar that counts bytes or another unit: `with bar(num_bytes, "load") as shown: shown.update(n)`."""
    # Write to sys.__stderr__, because some callers redirect sys.stderr to hide upstream's messages.
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


def each(items: Sequence[Item], title: str, unit: str = "B", sizes: Sequence[int] | None = None) -> Iterator[Item]:
    """Yield items and advance a progress bar by their sizes in bytes, or by 1 per item if `sizes` is None."""
    steps = sizes or [1] * len(items)
    with bar(sum(steps), title, unit) as shown:
        for item, step in zip(items, steps, strict=True):
            yield item
            shown.update(step)


def print_above(line: str) -> None:
    """Print a line to standard output, above any bars."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
