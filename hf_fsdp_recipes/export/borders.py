"""The ends of ranges, in pages of a file that other ranks write to as well. With several nodes, rank 0 writes all of them.

If a page is up to date in the cache of an NFS client, the client writes it back in full, over what other clients have written to
it meanwhile. So each page of an export is written on one node, and nothing is read until all ranks have closed the files.

Source: Linux `fs/nfs/write.c`, `nfs_update_folio`; nfs(5), "Close-to-open cache consistency".
"""

import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing.direct_io import BLOCK_BYTES
from hf_fsdp_recipes.errors import ExportError

MAX_BORDERS = 64 * 1024 * 1024 // BLOCK_BYTES  # in one message, so at most 64 MiB; rank 0 holds one at a time
Border = tuple[str, int, bytes]  # (file, first byte, content)


def write_on_main(borders: list[Border], write: Callable[[str, int, bytes], None]) -> Exception | None:
    """Send this rank's borders to rank 0, which writes those of all ranks with `write`.

    Collective: every rank must call this.

    Returns:
        Rank 0's error, to be raised on every rank.
    """
    batches = [borders[at : at + MAX_BORDERS] for at in range(0, len(borders), MAX_BORDERS)]
    sent = [] if distributed.is_main() else batches
    messages = [torch.frombuffer(bytearray(pickle.dumps(batch)), dtype=torch.uint8) for batch in sent]
    sizes = distributed.gather_objects([message.numel() for message in messages])
    for message in messages:
        dist.send(message, dst=0, group=distributed.host_group())
    if not distributed.is_main():
        return None
    error: Exception | None = None  # kept until all messages are received
    for batch in itertools.chain(batches, _receive(sizes)):
        try:
            for border in batch if error is None else []:
                write(*border)
        except Exception as caught:
            error = caught
    return error


def _receive(sizes: list[list[int]]) -> Iterator[list[Border]]:
    for sender, sent in enumerate(sizes):
        for num_bytes in sent:
            message = torch.empty(num_bytes, dtype=torch.uint8)
            dist.recv(message, src=sender, group=distributed.host_group())
            yield pickle.loads(message.numpy())


def check_borders(directory: Path, borders: list[Border]) -> None:
    """Check that the files hold this rank's borders. Any rank may call this, after all ranks have closed the files.

    Raises:
        ExportError: rank 0 or another node wrote other bytes there.
    """
    for file, group in itertools.groupby(sorted(borders), lambda border: border[0]):
        with (directory / file).open("rb", buffering=0) as stream:
            for _, offset, content in group:
                if os.pread(stream.fileno(), len(content), offset) != content:
                    raise ExportError(
                        f"{directory / file} differs at byte {offset:,} from what rank {distributed.rank()} sent to rank 0. Export "
                        f"again; if that fails too, export from one node."
                    )
