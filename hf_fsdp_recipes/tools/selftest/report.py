"""The report of a self-test: one Markdown file that can be attached to an issue."""

import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.checkpointing.resume import PACKAGES
from hf_fsdp_recipes.tools.selftest.measurements import Result

OPTIONAL_PACKAGES = ("bitsandbytes", "liger-kernel", "flash-attn", "kernels", "triton")


def write_report(file: Path, title: str, intro: Sequence[str], results: Sequence[Result]) -> None:
    """Write the machine, the versions, every figure, and the errors."""
    rows = [row for result in results for row in _rows(result)]
    lines = [f"# {title}", "", *intro, "", machine(), "", versions(), ""]
    lines += ["| measurement | figure | value |", "|---|---|---|", *rows, ""]
    for result in results:
        if result.error:
            lines += [f"## {result.name}: {result.status}", "", "```text", result.error, "```", ""]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines))


def _rows(result: Result) -> Iterator[str]:
    yield f"| {result.name} | {result.status} | {result.seconds:.0f} s |"
    for name, value in result.figures.items():
        yield f"| | {name} | {format_value(value)} |"


def format_value(value: Any) -> str:
    """Return a figure as text."""
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,}"
        if isinstance(value, int | float)
        else str(value)
    )


def machine() -> str:
    """Describe the host in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}, Python {platform.python_version()}"


def versions() -> str:
    """List the versions of the packages that matter, without those that are not installed."""
    found = []
    for name in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
