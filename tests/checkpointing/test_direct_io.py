"""Files written past the page cache hold the right bytes on every file system."""

import errno
import itertools
import os
import random

import pytest
import xxhash

from hf_fsdp_recipes.checkpointing import direct_io
from hf_fsdp_recipes.checkpointing.direct_io import (
    BLOCK_BYTES,
    BUFFER_BYTES,
    CHECKSUM_BLOCK_BYTES,
    MIN_DIRECT_BYTES,
    ChecksummedStream,
    DirectFile,
)


@pytest.fixture(params=["direct", "cannot be opened", "cannot be written"])
def file_system(request, monkeypatch):
    """Leave direct writing as the disk supports it, or make it fail on open or on write."""
    if request.param == "cannot be opened":
        monkeypatch.setattr(direct_io, "_open_direct", lambda file: None)
    if request.param == "cannot be written":
        write = os.pwrite

        def refuse(descriptor, view, offset):
            if descriptor in opened:
                raise OSError(errno.EINVAL, "no direct writing here")
            return write(descriptor, view, offset)

        opened = []
        open_direct = direct_io._open_direct

        def remember(file):
            opened.append(open_direct(file) or os.open(file, os.O_WRONLY))
            return opened[-1]

        monkeypatch.setattr(direct_io, "_open_direct", remember)
        monkeypatch.setattr(os, "pwrite", refuse)
    return request.param


def some_bytes(count):
    return random.Random(count).randbytes(count)


@pytest.mark.parametrize(
    "cuts",
    [
        [0, 5, BLOCK_BYTES, BLOCK_BYTES + MIN_DIRECT_BYTES, 3 * BUFFER_BYTES + 7],
        [0, 3 * BUFFER_BYTES],
        [0, 1, 2, BUFFER_BYTES - 1, BUFFER_BYTES + MIN_DIRECT_BYTES + 1, 2 * BUFFER_BYTES],
    ],
)
def test_runs_written_in_any_order_make_the_file(tmp_path, cuts, file_system):
    content = some_bytes(cuts[-1])
    file = tmp_path / "file"
    file.touch()
    os.truncate(file, len(content))
    writers = [DirectFile(file), DirectFile(file)]  # like two ranks that share the blocks at the ends of their runs
    runs = list(enumerate(itertools.pairwise(cuts)))
    for number, (start, end) in reversed(runs):
        writers[number % 2].write(content[start:end], start, direct_io.new_buffer())
    for writer in writers:
        writer.close()
    assert file.read_bytes() == content


def test_many_small_runs_are_not_buffered_forever(tmp_path):
    file = tmp_path / "file"
    file.touch()
    writer, step = DirectFile(file), MIN_DIRECT_BYTES // 2
    content = some_bytes(step * 20)
    for start in range(0, len(content), step):
        writer.write(content[start : start + step], start, direct_io.new_buffer())
        assert writer._small_bytes <= BUFFER_BYTES
    assert file.stat().st_size > 0
    writer.close()
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [3],
        [BLOCK_BYTES, 1],
        [BUFFER_BYTES + 1, 10, BUFFER_BYTES * 2],
        [7] * 1000,
        [BUFFER_BYTES],
        [CHECKSUM_BLOCK_BYTES],
        [5, 2 * CHECKSUM_BLOCK_BYTES, 9],
    ],
)
def test_stream_holds_what_was_given_and_its_checksum(tmp_path, sizes, file_system):
    content = some_bytes(sum(sizes))
    file, start = tmp_path / "file", 0
    with ChecksummedStream(file) as stream:
        for size in sizes:
            assert stream.tell() == start
            assert stream.write(memoryview(content)[start : start + size]) == size
            start += size
    assert file.read_bytes() == content
    starts = range(0, len(content), CHECKSUM_BLOCK_BYTES)
    assert stream.manifest_entry() == {
        "bytes": len(content),
        "xxh3": xxhash.xxh3_64_hexdigest(content),
        "blocks": [xxhash.xxh3_64_hexdigest(content[start : start + CHECKSUM_BLOCK_BYTES]) for start in starts],
    }


def test_full_disk_is_an_error_even_if_only_the_last_write_fails(tmp_path, monkeypatch):
    def full(descriptor, view, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    stream = ChecksummedStream(tmp_path / "file")
    stream.write(b"little enough to be held")
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    assert stream.closed
    file = DirectFile(tmp_path / "file")
    file.write(b"little", 0, direct_io.new_buffer())
    with pytest.raises(OSError, match="No space left"):
        file.close()
