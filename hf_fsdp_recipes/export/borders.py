"""If ranks on several nodes write an export, lets rank 0 alone write the borders of all chunks.

A chunk is a range of bytes that comes from one rank. A border is the part at the start or end of a chunk that does not fill a
page; another rank may write to the rest of that page.

When an NFS client changes a part of a page that is up to date in its cache, the client writes back the full page. This
overwrites what other clients have written to the page in the meantime. So each page of an export is written by one node only,
and no file is read until all ranks have closed the files.

Source: Linux `fs/nfs/write.c`, `nfs_update_folio`; nfs(5), "Close-to-open cache consistency".
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import ExportError

Border = tuple[str, int, bytes]  # (file, first byte, content)


def write_on_main(borders: list[Border], write: Callable[[str, int, bytes], None]) -> Exception | None:
    """Send the borders of all ranks to rank 0, which writes them and returns the first error or None; other ranks return None.

    Collective: every rank must call this, and the caller must raise rank 0's error on every rank. Rank 0 calls `write` with each
    border, and receives the borders of one rank at a time: at most two pages for each chunk that the sending rank writes.
    """
    if not distributed.is_main():
        dist.send_object_list([borders], dst=0, group=distributed.host_group())
        return None
    error: Exception | None = None  # kept until all messages are received
    for sender in range(distributed.world_size()):
        received = [borders]
        if sender != 0:
            dist.recv_object_list(received, src=sender, group=distributed.host_group())
        try:
            for border in received[0] if error is None else []:
                write(*border)
        except Exception as caught:
            error = caught
    return error


def check_borders(directory: Path, borders: list[Border]) -> None:
    """Raise an ExportError if the files do not contain this rank's borders. Call this after all ranks have closed the files."""
    for file, group in itertools.groupby(sorted(borders), lambda border: border[0]):
        with (directory / file).open("rb", buffering=0) as stream:
            for _, offset, content in group:
                if os.pread(stream.fileno(), len(content), offset) != content:
                    found = f"{directory / file} differs at byte {offset:,} from what rank {distributed.rank()} sent to rank 0."
                    raise ExportError(f"{found} Export again; if that fails too, export from one node.")
