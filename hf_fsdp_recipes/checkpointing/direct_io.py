"""Writes files past the page cache where the file system lets it (O_DIRECT), and as usual where it does not.

For gigabytes that nobody reads again soon, the page cache costs more than the disk: its pages are allocated and
cleared one by one, take memory that training wants, and two ranks that fill one file wait for each other's lock.
Whole blocks go to the disk from one aligned buffer; what is left at either end goes through the cache.

Source: open(2), "O_DIRECT", on alignment and on mixing both ways in one file.
"""

import errno
import io
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

BLOCK_BYTES = 4096  # what offset, length and memory are multiples of
BUFFER_BYTES = 2 * 1024 * 1024
MIN_DIRECT_BYTES = 256 * 1024  # for less, a trip to the disk takes longer than the cache


class DirectFile:
    """An existing file to write runs of bytes into, in any order, by one thread. Close it to make them durable."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY)
        self._direct = _open_direct(file)
        self._small: list[tuple[bytes, int]] = []
        self._small_bytes = 0

    def write(self, data: Any, offset: int, buffer: mmap.mmap) -> None:
        """Write all of `data` from byte `offset` on, whole blocks by way of an aligned buffer.

        Raises:
            OSError: the disk is full or fails.
        """
        view = memoryview(data).cast("B")
        first_block = -(-offset // BLOCK_BYTES) * BLOCK_BYTES
        last_block = (offset + len(view)) // BLOCK_BYTES * BLOCK_BYTES
        if last_block - first_block < MIN_DIRECT_BYTES:
            self._write_later(view, offset)
            return
        self._write_later(view[: first_block - offset], offset)
        for start in range(first_block, last_block, len(buffer)):
            count = min(len(buffer), last_block - start)
            buffer[:count] = view[start - offset : start - offset + count]
            self.write_blocks(buffer, count, start)
        self._write_later(view[last_block - offset :], last_block)

    def _write_later(self, view: memoryview, offset: int) -> None:
        """Keep what goes through the cache for a while: there each write would wait for other ranks' blocks."""
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
        """Write the first `count` bytes of an aligned buffer at the start of a block; a part of a block may end them."""
        whole = count // BLOCK_BYTES * BLOCK_BYTES
        with memoryview(buffer) as view:
            if self._direct is not None and whole:
                try:
                    _write_all(self._direct, view[:whole], offset)
                    _write_all(self._descriptor, view[whole:count], offset + whole)
                    return
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                os.close(self._direct)  # it could be opened and yet cannot be written
                self._direct = None
            _write_all(self._descriptor, view[:count], offset)

    def close(self) -> None:
        """Write the rest, make all of it durable and close.

        Raises:
            OSError: the disk is full or fails.
        """
        try:
            self._write_small()
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            if self._direct is not None:
                os.close(self._direct)


class ChecksummedStream(io.RawIOBase):
    """A new file, written from front to back, and the XXH3 of its bytes taken on the way.

    Args:
        file: its path.
        notify: is told of bytes as they are taken.
    """

    def __init__(self, file: Path, notify: Callable[[int], Any] = lambda num_bytes: None) -> None:
        super().__init__()
        self._notify = notify
        file.touch()
        self._file = DirectFile(file)
        self._buffer = new_buffer()
        self._start = self._held = 0  # where in the file the buffer's bytes belong, and how many it holds
        self._sum = xxhash.xxh3_64()

    def writable(self) -> bool:
        """Tell that this is a file to write to."""
        return True

    def tell(self) -> int:
        """Return how many bytes were given."""
        return self._start + self._held

    def write(self, data: Any) -> int:
        """Take all of `data`; return its bytes."""
        view = memoryview(data).cast("B")
        self._sum.update(view)
        taken = 0
        while taken < len(view):
            count = min(len(self._buffer) - self._held, len(view) - taken)
            self._buffer[self._held : self._held + count] = view[taken : taken + count]
            taken, self._held = taken + count, self._held + count
            if self._held == len(self._buffer):
                self._file.write_blocks(self._buffer, self._held, self._start)
                self._start, self._held = self.tell(), 0
        self._notify(taken)
        return taken

    def described(self) -> dict[str, int | str]:
        """Return what a manifest says of a file: bytes and checksum of what was given so far."""
        return {"bytes": self.tell(), "xxh3": self._sum.hexdigest()}

    def close(self) -> None:
        """Write what is still held and make all of it durable."""
        if self.closed:
            return
        try:
            self._file.write_blocks(self._buffer, self._held, self._start)
        finally:
            super().close()
            self._file.close()


def new_buffer() -> mmap.mmap:
    """Return memory that begins where a page does."""
    return mmap.mmap(-1, BUFFER_BYTES)


def _open_direct(file: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", None)  # Linux has it
    try:
        return None if flag is None else os.open(file, os.O_WRONLY | flag)
    except OSError:
        return None


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
