"""The report of a self-test: one Markdown file that can be attached to an issue."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hf_fsdp_recipes.checkpointing.resume import PACKAGES
from hf_fsdp_recipes.environment import package_version
from hf_fsdp_recipes.tools.selftest.measurements import Result

OPTIONAL_PACKAGES = ("bitsandbytes", "liger-kernel", "flash-attn", "kernels", "triton")
ON_CPU = "CPU ranks over gloo: the checks are valid, but the figures say nothing about accelerators"


def write_report(file: Path, title: str, device: str | None, num_ranks: int, results: Sequence[Result]) -> None:
    """Write machine and versions, all figures, and the errors."""
    names = (*PACKAGES, *OPTIONAL_PACKAGES)
    versions = [f"{name} {found}" for name in names if (found := package_version(name))]
    memory = psutil.virtual_memory().total / 2**30
    lines = [
        f"# {title}",
        "",
        f"- ranks: {num_ranks}; {device or ON_CPU}",
        f"- host: {os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}, Python {platform.python_version()}",
        f"- versions: {', '.join(versions)}",
        "",
        "| measurement | figure | value |",
        "|---|---|---|",
    ]
    for result in results:
        lines.append(f"| {result.name} | {result.status} | {result.seconds:.0f} s |")
        lines += [f"| | {name} | {_format(value)} |" for name, value in result.figures.items()]
    for result in results:
        if result.error:
            lines += ["", f"{result.name}, {result.status}:", "", "```text", result.error, "```"]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
