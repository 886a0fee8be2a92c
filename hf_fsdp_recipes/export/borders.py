"""The ends of ranges, in pages of a file that other ranks write to as well. With several nodes, rank 0 writes all of them.

If a page is up to date in the cache of an NFS client, the client writes it back in full, over what other clients have written to
it meanwhile. So each page of an export is written on one node, and nothing is read until all ranks have closed the files.

Source: Linux `fs/nfs/write.c`, `nfs_update_folio`; nfs(5), "Close-to-open cache consistency".
"""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.direct_io import BLOCK_BYTES
from hf_fsdp_recipes.errors import ExportError

MAX_BORDERS = 64 * 1024 * 1024 // BLOCK_BYTES  # in one message, so at most 64 MiB; rank 0 holds one at a time
Border = tuple[str, int, bytes]  # (file, first byte, content)


def write_on_main(borders: list[Border], write: Callable[[str, int, bytes], None]) -> Exception | None:
    """Send this rank's borders to rank 0, which writes those of all ranks; return rank 0's error, to be raised on every rank.

    Collective: every rank must call this. Rank 0 calls `write` with each border.
    """
    batches = [borders[at : at + MAX_BORDERS] for at in range(0, len(borders), MAX_BORDERS)]
    num_messages = distributed.gather_objects(len(batches))
    if not distributed.is_main():
        for batch in batches:
            dist.send_object_list([batch], dst=0, group=distributed.host_group())
        return None
    error: Exception | None = None  # kept until all messages are received
    for batch in itertools.chain(batches, _receive(num_messages)):
        try:
            for border in batch if error is None else []:
                write(*border)
        except Exception as caught:
            error = caught
    return error


def _receive(num_messages: list[int]) -> Iterator[list[Border]]:
    for sender in range(1, len(num_messages)):
        for _ in range(num_messages[sender]):
            received: list[list[Border]] = [[]]
            dist.recv_object_list(received, src=sender, group=distributed.host_group())
            yield received[0]


def check_borders(directory: Path, borders: list[Border]) -> None:
    """Check that the files hold this rank's borders. Any rank may call this, after all ranks have closed the files.

    Raises:
        ExportError: rank 0 or another node wrote other bytes there.
    """
    for file, group in itertools.groupby(sorted(borders), lambda border: border[0]):
        with (directory / file).open("rb", buffering=0) as stream:
            for _, offset, content in group:
                if os.pread(stream.fileno(), len(content), offset) != content:
                    found = f"{directory / file} differs at byte {offset:,} from what rank {distributed.rank()} sent to rank 0."
                    raise ExportError(f"{found} Export again; if that fails too, export from one node.")
