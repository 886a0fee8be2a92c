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
from hf_fsdp_recipes.errors import ExportError

MESSAGE_BYTES = 64 * 1024 * 1024  # of borders; rank 0 holds one message at a time
Border = tuple[str, int, bytes]  # (file, first byte, content)


def write_on_main(borders: list[Border], write: Callable[[str, int, bytes], None]) -> Exception | None:
    """Write the borders of all ranks on rank 0. Collective: every rank must call this.

    Args:
        borders: this rank's.
        write: writes one; rank 0 calls it.

    Returns:
        Rank 0's error, so that it can be raised on every rank.
    """
    batches = list(_batches(borders))
    messages = [] if distributed.is_main() else [_pack(batch) for batch in batches]
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


def _batches(borders: list[Border]) -> Iterator[list[Border]]:
    ends = itertools.accumulate(len(content) for _, _, content in borders)
    numbered = zip(ends, borders, strict=True)
    for _, batch in itertools.groupby(numbered, lambda item: item[0] // MESSAGE_BYTES):
        yield [border for _, border in batch]


def _pack(batch: list[Border]) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(batch)), dtype=torch.uint8)


def _receive(sizes: list[list[int]]) -> Iterator[list[Border]]:
    for sender, num_bytes in ((sender, num_bytes) for sender, sent in enumerate(sizes) for num_bytes in sent):
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
