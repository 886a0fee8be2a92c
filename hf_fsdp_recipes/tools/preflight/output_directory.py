"""Checks that all nodes share a writable output directory with space for the run's checkpoints, and measures its speed.

Each node writes a probe file and looks for the files of the other nodes. All probe files are removed.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.configs.validate import Section
from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight.node_info import Row, shorten

MAX_PROBE_BYTES = 64 << 20
MAX_PROBE_SECONDS = 1.0
# Enough on NFS: listing a directory refreshes NFS's cache of it, which is otherwise kept for 30 s (acdirmin).
VISIBILITY_SECONDS = 5.0
_CHUNK_BYTES = 16 << 20


def write_probe(file: Path) -> tuple[float, int]:
    """Write and flush a probe file; return the write speed in bytes per second, and the free space in bytes.

    Raises a PreflightError if the file cannot be written.
    """
    chunk = os.urandom(_CHUNK_BYTES)  # random, so that file systems cannot compress it
    num_bytes, started = 0, time.monotonic()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb", buffering=0) as stream:
            while num_bytes < MAX_PROBE_BYTES and time.monotonic() - started < MAX_PROBE_SECONDS:
                num_bytes += stream.write(chunk)
                os.fsync(stream.fileno())
        bytes_per_second = num_bytes / (time.monotonic() - started)
        return bytes_per_second, shutil.disk_usage(file.parent).free
    except OSError as error:
        raise PreflightError(
            f"output directory {file.parent} cannot be written ({error.strerror}). Every node writes its part of each "
            f"checkpoint there; check the path, permissions, quota and mounts on that node."
        ) from error


def find_invisible(files: list[Path]) -> list[int]:
    """Wait up to 5 s until this node sees all files; return the indices of those that it still does not see."""
    deadline = time.monotonic() + VISIBILITY_SECONDS
    while True:
        invisible = [index for index, file in enumerate(files) if not file.exists()]
        if not invisible or time.monotonic() > deadline:
            return invisible
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            list(files[0].parent.iterdir())  # makes NFS refresh the directory


def check_shared(directory: Path, invisible_by_node: list[list[int]], names: list[str]) -> None:
    """Raise PreflightError if a node does not see another node's probe file."""
    pairs = [
        f"{name} does not see the file of {shorten([names[node] for node in invisible])}"
        for name, invisible in zip(names, invisible_by_node, strict=True)
        if invisible
    ]
    if pairs:
        raise PreflightError(
            f"output directory {directory} is not shared: {'; '.join(pairs[:4])}. All nodes write one checkpoint there; pass "
            f"an absolute path on storage that all of them mount."
        )


def describe(directory: Path, probes: list[tuple[float, int]], names: list[str]) -> Row:
    """Return the preflight table's row about the directory. `probes` holds what `write_probe` returned on each node."""
    rate, slowest = min((rate, name) for (rate, _), name in zip(probes, names, strict=True))
    free_bytes = min(free_bytes for _, free_bytes in probes)
    return (
        "output",
        f"{directory} is shared and writable; while all nodes write, the slowest is {slowest}: {rate / 1e6:,.0f} MB/s with "
        f"fsync; {free_bytes / 1e9:,.1f} GB free",
    )


def check_space(directory: Path, recipe: Section) -> Row:
    """Return the preflight table's row about disk space, or raise PreflightError if the run needs more than there is.

    The space of existing checkpoints counts as free, because a resumed run replaces them one by one.
    """
    try:
        estimate = disk_estimate.estimate(recipe)
    except Exception as error:  # building the model may raise any exception, and the job can run without an estimate
        return ("warning", f"what the run will write could not be estimated: {error}")
    files = (file for checkpoint in directory.glob("checkpoint-*") for file in checkpoint.rglob("*"))
    own_bytes = sum(file.stat().st_size for file in files if file.is_file())
    available_bytes = shutil.disk_usage(directory).free + own_bytes
    if estimate.total_bytes > available_bytes:
        raise PreflightError(
            f"{directory} has {available_bytes / 1e9:,.2f} GB available (free, or used by the run's own checkpoints), but the "
            f"run writes {estimate}. Lower save_total_limit, choose another output directory, or free some space."
        )
    return ("space", f"the run writes {estimate}; {available_bytes / 1e9:,.1f} GB available")
