"""Checks that all nodes write into one directory, how fast, and whether what the run will write fits.

Each node writes a file and looks for the others'. Leaves nothing but the directory itself; imports no torch.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight.node_info import shorten

WRITE_BYTES = 64 << 20
WRITE_SECONDS = 1.0  # a slow disk is told from less
SETTLE_SECONDS = 5.0  # NFS shows another host's new file after its attribute cache has aged (acdirmin, 30 s at worst)
_CHUNK_BYTES = 16 << 20


def token(directory: Path, nonce: str, node: int) -> Path:
    """Return the file by which a node shows itself."""
    return directory / f".preflight-{nonce}-{node}"


def write_token(directory: Path, nonce: str, node: int) -> dict[str, Any]:
    """Write this node's file; return how fast that was and what is free.

    Raises:
        PreflightError: the directory cannot be made or written.
    """
    chunk = os.urandom(_CHUNK_BYTES)  # a file system that compresses would flatter zeros
    try:
        directory.mkdir(parents=True, exist_ok=True)
        num_bytes, started = 0, time.monotonic()
        with token(directory, nonce, node).open("wb", buffering=0) as stream:
            while num_bytes < WRITE_BYTES and time.monotonic() - started < WRITE_SECONDS:
                num_bytes += stream.write(chunk)
                os.fsync(stream.fileno())
        seconds = time.monotonic() - started
        usage = shutil.disk_usage(directory)
    except OSError as error:
        raise PreflightError(
            f"output directory {directory} cannot be written ({error.strerror}). Rule: every node writes its part of each "
            f"checkpoint there. Remedy: check path, permissions, quota and mounts on that node."
        ) from error
    return {
        "bytes_per_second": num_bytes / seconds,
        "free_bytes": usage.free,
        "total_bytes": usage.total,
        "path": str(directory.resolve()),
    }


def remove_token(directory: Path, nonce: str, node: int) -> None:
    """Remove this node's file, if it is there."""
    with contextlib.suppress(OSError):
        token(directory, nonce, node).unlink()


def find_unseen(directory: Path, nonce: str, num_nodes: int) -> list[int]:
    """Return the nodes whose files cannot be seen from here, after waiting for slow caches."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        unseen = [node for node in range(num_nodes) if not token(directory, nonce, node).exists()]
        if not unseen or time.monotonic() > until:
            return unseen
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            list(directory.iterdir())  # makes NFS look again


def check_shared(directory: Path, unseen: list[list[int]], names: list[str]) -> None:
    """Check that every node sees every node's file.

    Raises:
        PreflightError: some do not; says who does not see whom.
    """
    blind = [
        f"{name} does not see the file of {shorten([names[node] for node in missing])}"
        for name, missing in zip(names, unseen, strict=True)
        if missing
    ]
    if blind:
        raise PreflightError(
            f"output directory {directory} is not shared: {'; '.join(blind[:4])}. Rule: all nodes write one checkpoint into "
            f"one directory. Remedy: an absolute path on storage that all nodes mount."
        )


def describe(directory: Path, written: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Return the table's line."""
    slowest = min(range(len(written)), key=lambda index: written[index]["bytes_per_second"])
    rate, free_bytes = written[slowest]["bytes_per_second"], min(each["free_bytes"] for each in written)
    return [
        f"{'output':<10}{directory} is shared and writable; {rate / 1e6:,.0f} MB/s with fsync on {names[slowest]}, all nodes "
        f"writing; {free_bytes / 1e9:,.1f} GB free"
    ]


def check_space(directory: Path, need: disk_estimate.Need) -> str:
    """Compare what a run will write with what is free; return the table's text.

    Raises:
        PreflightError: it does not fit.
    """
    free_bytes = shutil.disk_usage(directory).free + existing_bytes(directory)
    if need.total_bytes > free_bytes:
        raise PreflightError(
            f"{directory} has no room for the run: it writes {need}, and {free_bytes / 1e9:,.2f} GB are free or taken by its "
            f"own checkpoints. Remedy: a smaller save_total_limit, another output directory, or free some space."
        )
    return f"the run writes {need}; {free_bytes / 1e9:,.1f} GB are free or its own already"


def existing_bytes(directory: Path) -> int:
    """Return what a run's checkpoints take already; a run that resumes writes over them in turn."""
    files = (file for checkpoint in directory.glob("checkpoint-*") for file in checkpoint.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())
