"""Writes files past the page cache (O_DIRECT), or through it if the file system has no O_DIRECT.

For gigabytes that will not be read again soon the page cache costs more than the disk: its pages are allocated and cleared
one by one, take memory from training, and two ranks that write one file wait for each other's lock. Full blocks go to the
disk from one aligned buffer; what remains at either end goes through the cache.

Source: open(2), "O_DIRECT", on alignment and on mixing both ways in one file.
"""

import errno
import io
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 4096  # offset, length and memory of a direct write are multiples of it
BUFFER_BYTES = 2 * 1024 * 1024
MIN_DIRECT_BYTES = 256 * 1024  # smaller writes are faster through the cache


class DirectFile:
    """An existing file to write byte ranges into, in any order, from one thread. `close` makes them durable."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY)
        self._direct = _open_direct(file)
        self._small: list[tuple[bytes, int]] = []
        self._small_bytes = 0

    def write(self, data: "ReadableBuffer", offset: int, buffer: mmap.mmap) -> None:
        """Write all of `data` from byte `offset` on, its full blocks by way of an aligned buffer.

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
        """Collect writes through the cache: each one would wait for the blocks of other ranks."""
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
        """Write the first `count` bytes of an aligned buffer to `offset`, the start of a block."""
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
                os.close(self._direct)  # some file systems open with O_DIRECT but cannot write
                self._direct = None
            _write_all(self._descriptor, view[:count], offset)

    def close(self) -> None:
        """Write what remains, make the file durable and close it.

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
    """A new file, written from front to back, that takes the XXH3 of its bytes on the way.

    Args:
        file: its path.
        notify: called with the number of bytes of each write.
    """

    def __init__(self, file: Path, notify: Callable[[int], Any] = lambda num_bytes: None) -> None:
        super().__init__()
        self._notify = notify
        file.touch()
        self._file = DirectFile(file)
        self._buffer = new_buffer()
        self._start = self._num_buffered = 0  # file offset of the buffer's first byte; bytes in the buffer
        self._hash = xxhash.xxh3_64()

    def writable(self) -> bool:
        """Tell that this is a file to write to."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._start + self._num_buffered

    def write(self, data: "ReadableBuffer") -> int:
        """Write all of `data`; return its number of bytes."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        done = 0
        while done < len(view):
            count = min(len(self._buffer) - self._num_buffered, len(view) - done)
            self._buffer[self._num_buffered : self._num_buffered + count] = view[done : done + count]
            done, self._num_buffered = done + count, self._num_buffered + count
            if self._num_buffered == len(self._buffer):
                self._file.write_blocks(self._buffer, self._num_buffered, self._start)
                self._start, self._num_buffered = self.tell(), 0
        self._notify(done)
        return done

    def manifest_entry(self) -> dict[str, int | str]:
        """Return the bytes and the checksum of what was written so far, as a manifest lists them."""
        return {"bytes": self.tell(), "xxh3": self._hash.hexdigest()}

    def close(self) -> None:
        """Write what is buffered and make the file durable."""
        if self.closed:
            return
        try:
            self._file.write_blocks(self._buffer, self._num_buffered, self._start)
        finally:
            super().close()
            self._file.close()


def new_buffer() -> mmap.mmap:
    """Return page-aligned memory."""
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
