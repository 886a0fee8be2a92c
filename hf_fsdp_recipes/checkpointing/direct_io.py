"""Writes files with O_DIRECT, or through the page cache if the file system does not support O_DIRECT.

For gigabytes that are not read again soon, the page cache takes more time than the disk: the kernel allocates and zeroes pages one
by one, the pages take memory from training, and ranks that write to the same file contend for a lock. Full blocks are written
directly from one aligned buffer; the bytes before and after them go through the cache.

Source: open(2), "O_DIRECT", on alignment and on mixing direct and cached writes.
"""

import errno
import io
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from hf_fsdp_recipes.checkpointing.layout import ManifestEntry

BLOCK_BYTES = max(4096, mmap.PAGESIZE)  # offset, length and memory address of a direct write must be multiples of this
BUFFER_BYTES = 2 * 1024 * 1024
CHECKSUM_BLOCK_BYTES = 8 * 1024 * 1024  # a manifest has one checksum per block of this size; multiple of BUFFER_BYTES
MIN_DIRECT_BYTES = 256 * 1024  # smaller writes are faster through the cache


class DirectFile:
    """Writes byte ranges to an existing file, in any order, from one thread. `close` makes the writes durable."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY)
        self._direct = _open_direct(file)
        self._small: list[tuple[bytes, int]] = []
        self._small_bytes = 0

    def write(self, data: "ReadableBuffer", offset: int, buffer: mmap.mmap) -> None:
        """Write all of `data` at byte `offset`. Full blocks are copied to the aligned `buffer` and written from there."""
        view = memoryview(data).cast("B")
        head, blocks, tail = split_at_blocks(view, offset)
        if len(blocks) < MIN_DIRECT_BYTES:
            self._write_later(view, offset)
            return
        self._write_later(head, offset)
        first_block = offset + len(head)
        for start in range(0, len(blocks), len(buffer)):
            count = min(len(buffer), len(blocks) - start)
            buffer[:count] = blocks[start : start + count]
            self.write_blocks(buffer, count, first_block + start)
        self._write_later(tail, first_block + len(blocks))

    def _write_later(self, view: memoryview, offset: int) -> None:
        """Delay a small write: it goes through the page cache, where it waits for blocks that other ranks write to the file."""
        if view:
            self._small.append((bytes(view), offset))
            self._small_bytes += len(view)
        if self._small_bytes > BUFFER_BYTES:
            self._write_small()

    def _write_small(self) -> None:
        for content, offset in self._small:
            _write_all(self._descriptor, memoryview(content), offset)
        self._small, self._small_bytes = [], 0

    def write_blocks(self, buffer: mmap.mmap, count: int, offset: int) -> None:
        """Write the first `count` bytes of an aligned buffer to `offset`, which must be the start of a block."""
        direct_bytes = count // BLOCK_BYTES * BLOCK_BYTES
        with memoryview(buffer) as view:
            if self._direct is not None and direct_bytes:
                try:
                    _write_all(self._direct, view[:direct_bytes], offset)
                    _write_all(self._descriptor, view[direct_bytes:count], offset + direct_bytes)
                    return
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                os.close(self._direct)  # some file systems accept O_DIRECT on open but fail to write
                self._direct = None
            _write_all(self._descriptor, view[:count], offset)

    def close(self) -> None:
        """Write the remaining bytes, make the file durable and close it."""
        try:
            self._write_small()
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            if self._direct is not None:
                os.close(self._direct)


class ChecksummedStream(io.RawIOBase):
    """Writes a new file sequentially, and computes XXH3 checksums of the file and of each 8 MiB block while writing.

    Args:
        file: path of the new file.
        notify: called with the number of bytes of each write.
    """

    def __init__(self, file: Path, notify: Callable[[int], object] = lambda num_bytes: None) -> None:
        super().__init__()
        self._notify = notify
        file.touch()
        self._file = DirectFile(file)
        self._buffer = new_buffer()
        self._start = self._num_buffered = 0  # file offset of the buffer's first byte; number of bytes in the buffer
        self._hash, self._block_hash = xxhash.xxh3_64(), xxhash.xxh3_64()
        self._blocks: list[str] = []

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._start + self._num_buffered

    def write(self, data: "ReadableBuffer") -> int:
        """Write all of `data`; return its number of bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            count = min(len(self._buffer) - self._num_buffered, len(view) - done)
            self._buffer[self._num_buffered : self._num_buffered + count] = view[done : done + count]
            done, self._num_buffered = done + count, self._num_buffered + count
            if self._num_buffered == len(self._buffer):
                self._flush()
        self._notify(done)
        return done

    def _flush(self) -> None:
        """Add the buffer to the checksums while it is still in the CPU's cache, then write it."""
        with memoryview(self._buffer)[: self._num_buffered] as content:
            self._hash.update(content)
            self._block_hash.update(content)
        self._file.write_blocks(self._buffer, self._num_buffered, self._start)
        if self._num_buffered and self.tell() % CHECKSUM_BLOCK_BYTES == 0:
            self._blocks.append(self._block_hash.hexdigest())
            self._block_hash.reset()
        self._start, self._num_buffered = self.tell(), 0

    def manifest_entry(self) -> "ManifestEntry":
        """Return the size and checksums of the closed file, in the manifest's format."""
        last = [self._block_hash.hexdigest()] if self.tell() % CHECKSUM_BLOCK_BYTES else []
        return {"bytes": self.tell(), "xxh3": self._hash.hexdigest(), "blocks": [*self._blocks, *last]}

    def close(self) -> None:
        """Write the buffered bytes and make the file durable."""
        if self.closed:
            return
        try:
            self._flush()
        finally:
            super().close()
            self._file.close()


def split_at_blocks(view: memoryview, offset: int) -> tuple[memoryview, memoryview, memoryview]:
    """Split bytes to be written at `offset` into those before the first full block, the full blocks, and the rest."""
    first = min(-offset % BLOCK_BYTES, len(view))
    last = max(first, len(view) - (offset + len(view)) % BLOCK_BYTES)
    return view[:first], view[first:last], view[last:]


def new_buffer() -> mmap.mmap:
    """Return a page-aligned buffer of BUFFER_BYTES."""
    return mmap.mmap(-1, BUFFER_BYTES)


def _open_direct(file: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", None)  # Linux only
    try:
        return None if flag is None else os.open(file, os.O_WRONLY | flag)
    except OSError:
        return None


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
