"""Reads ranges of elements from torch DCP's `.distcp` files, whichever program wrote them.

A `.distcp` file is a sequence of uncompressed torch.save archives, each with one rank's chunk of one tensor. `.metadata`
records where each archive begins; the archive's zip directory records where the tensor's bytes begin. Objects that are not
tensors are not read.

Source: torch 2.13 `distributed/checkpoint/filesystem.py`, `metadata.py`; the torch.save archive format.
"""

import io
import logging
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.dcp_metadata import read_dcp_metadata
from hf_fsdp_recipes.checkpointing.direct_io import CHECKSUM_BLOCK_BYTES
from hf_fsdp_recipes.checkpointing.layout import METADATA_FILE, MODEL_DIRECTORY
from hf_fsdp_recipes.errors import UNREADABLE, CheckpointError, ExportError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

logger = logging.getLogger(__name__)

NUM_RECENT_BLOCKS = 4
RecentBlocks = dict[tuple[Path, int], memoryview]
Checksums = dict[Path, list[str] | None]
PlainPickles = dict[bytes, bool]  # for each pickle found in an archive, whether it describes a contiguous tensor


class StoredFile:
    """A `.distcp` file whose 8 MiB blocks are verified when they are first read.

    Args:
        path: the file.
        checksums: XXH3 of each block, or None to read without verifying.
        recent: cache of the most recently verified blocks. All files share it, so its size does not grow with their number.
    """

    def __init__(self, path: Path, checksums: list[str] | None, recent: RecentBlocks) -> None:
        self.path = path
        self.stream = path.open("rb", buffering=0)
        self.num_bytes = os.fstat(self.stream.fileno()).st_size
        self._checksums = checksums
        self._recent = recent
        self._verified: set[int] = set()

    def read(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `offset` on; raise an ExportError if a block differs from its checksum."""
        while target:
            number, at = divmod(offset, CHECKSUM_BLOCK_BYTES)
            part = target[: CHECKSUM_BLOCK_BYTES - at]
            self.verify(offset)
            block = self._recent.get((self.path, number))
            if block is None:
                self._read_raw(offset, part)
            else:
                part[:] = block[at : at + len(part)]
            target, offset = target[len(part) :], offset + len(part)

    def verify(self, offset: int) -> None:
        """Verify the block that contains the byte at `offset`, unless it has been verified before."""
        number = offset // CHECKSUM_BLOCK_BYTES
        if self._checksums is None or number in self._verified:
            return
        if number >= len(self._checksums):
            raise _changed(self.path)
        start = number * CHECKSUM_BLOCK_BYTES
        block = memoryview(bytearray(min(CHECKSUM_BLOCK_BYTES, self.num_bytes - start)))
        self._read_raw(start, block)
        if xxhash.xxh3_64_hexdigest(block) != self._checksums[number]:
            raise _changed(self.path)
        self._verified.add(number)
        self._recent[self.path, number] = block
        if len(self._recent) > NUM_RECENT_BLOCKS:
            del self._recent[next(iter(self._recent))]

    def _read_raw(self, offset: int, target: memoryview) -> None:
        while target:
            try:
                count = os.preadv(self.stream.fileno(), [target], offset)
            except OSError as error:
                raise ExportError(
                    f"{self.path} cannot be read: {error.strerror}. Export another checkpoint."
                ) from error
            if count == 0:
                raise ExportError(
                    f"{self.path} ended at byte {offset:,}: it changed while it was being read. Export another checkpoint."
                )
            target, offset = target[count:], offset + count


@dataclass(frozen=True)
class Chunk:
    """Elements [first, first + count) of a flattened tensor, stored in one torch.save archive of a file.

    The elements begin at byte `start()` of the file. The archive that holds them begins at byte `offset`.
    """

    first: int
    count: int
    file: StoredFile
    start: Callable[[], int]  # the first call opens the archive; opening all archives of 512 ranks takes minutes
    offset: int
    length: int  # the archive's length in bytes


@dataclass(frozen=True)
class DcpTensor:
    """One tensor of a checkpoint, with its chunks in the order of their elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return elements [start, start + count) of the flattened tensor, as a 1-D tensor on the CPU."""
        out = torch.empty(count, dtype=self.dtype)
        view = memoryview(out.view(torch.uint8).numpy())
        size = self.dtype.itemsize
        for chunk in self.chunks:
            low, high = max(start, chunk.first), min(start + count, chunk.first + chunk.count)
            if low < high:
                target = view[(low - start) * size : (high - start) * size]
                chunk.file.read(chunk.start() + (low - chunk.first) * size, target)
                # Headers in the archive's first and last blocks say where the values begin, so verify these two blocks too.
                if low == chunk.first:
                    chunk.file.verify(chunk.offset)
                if high == chunk.first + chunk.count:
                    chunk.file.verify(chunk.offset + chunk.length - 1)
        return out


class _Window(io.RawIOBase):
    """Presents a byte range of a file as a file object, for zipfile and torch.load."""

    def __init__(self, stream: io.RawIOBase, start: int, length: int) -> None:
        self._stream = stream
        self._start, self._length, self._at = start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        count = os.preadv(
            self._stream.fileno(), [memoryview(buffer)[: max(0, self._length - self._at)]], self._start + self._at
        )
        self._at += count
        return count


def find_directory(checkpoint: Path) -> Path:
    """Return the directory that holds the model's `.metadata`: a subdirectory of the checkpoint, or the checkpoint itself.

    Raises an ExportError if neither holds this file.
    """
    for candidate in (checkpoint / MODEL_DIRECTORY, checkpoint):
        if (candidate / METADATA_FILE).is_file():
            return candidate
    raise ExportError(
        f"{checkpoint} holds no sharded model: neither it nor its {MODEL_DIRECTORY} has a {METADATA_FILE} file. Pass a "
        f"checkpoint-<step> that was saved as SHARDED_STATE_DICT, or a directory of .distcp files."
    )


def read_index(directory: Path) -> dict[str, DcpTensor]:
    """Return, for each tensor name in a DCP directory, the tensor's shape, dtype and chunks.

    Not a collective. Files without block checksums in the manifest are read and verified in full first.

    Raises:
        ExportError: `.metadata` cannot be read, a file is missing, truncated or differs from the checkpoint's manifest, or
            a tensor is not sharded by rows.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    files = _open_files(directory)
    try:
        metadata = read_dcp_metadata(directory)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    try:
        stored = (metadata.storage_data or {}).items()
        storage = {(index.fqn, tuple(index.offset or ())): info for index, info in stored}
        tensors = {}
        plain: PlainPickles = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                chunks = [_chunk(directory, name, entry, chunk, storage, files, plain) for chunk in entry.chunks]
                tensors[name] = _join(directory, name, entry, chunks)
        return tensors
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ExportError(f"{directory / METADATA_FILE} is damaged ({error!r}). Export another checkpoint.") from error


def _open_files(directory: Path) -> Callable[[str], StoredFile]:
    """Return a function that opens a file of a DCP directory, given the file's name. It opens each file only once."""
    checksums = _verify_manifest(directory)
    recent: RecentBlocks = {}

    @cache
    def open_file(name: str) -> StoredFile:
        path = directory / name
        if checksums is not None and path not in checksums:
            raise ExportError(f"{path} is not in the checkpoint's {layout.MANIFEST}. Export another checkpoint.")
        try:
            return StoredFile(path, (checksums or {}).get(path), recent)
        except OSError as error:
            raise ExportError(
                f"{path} is missing or cannot be read: {error.strerror}. Export another checkpoint."
            ) from error

    return open_file


def _verify_manifest(directory: Path) -> Checksums | None:
    """Check the sizes of the files that an export reads, and the full checksums of files without block checksums.

    Return {file: block checksums}, or None if there is no manifest. The blocks are verified later, when they are read.
    """
    root = directory.parent if directory.name == MODEL_DIRECTORY else directory
    if not (root / layout.MANIFEST).is_file():
        if distributed.is_main():
            logger.warning("%s has no %s; exporting without integrity checks", root, layout.MANIFEST)
        return None
    checksums: Checksums = {}
    try:
        for name, entry in layout.read_manifest(root)["files"].items():
            file, num_bytes, blocks = root / name, int(entry["bytes"]), entry.get("blocks")
            # Skip files of the optimizer, the scheduler and random states, because an export does not read them.
            if file.parent not in (root, directory) or file.suffix in (".pt", ".pth"):
                continue
            if layout.find_size(file) != num_bytes:
                raise ExportError(
                    f"{file} is missing or does not have the {num_bytes:,} bytes that {layout.MANIFEST} lists. Export another "
                    f"checkpoint."
                )
            if blocks is not None and len(blocks) != -(-num_bytes // CHECKSUM_BLOCK_BYTES):
                raise ValueError(f"{name} has {len(blocks)} blocks")
            checksums[file] = blocks
            if blocks is None and layout.checksum(file) != str(entry["xxh3"]):
                raise _changed(file)
    except UNREADABLE as error:
        raise ExportError(f"{root / layout.MANIFEST} cannot be read ({error!r}). Export another checkpoint.") from error
    return checksums


def _changed(file: Path) -> ExportError:
    return ExportError(f"{file} has changed: its checksum differs from {layout.MANIFEST}. Export another checkpoint.")


def _chunk(
    directory: Path,
    name: str,
    entry: "TensorStorageMetadata",
    chunk: "ChunkStorageMetadata",
    storage: "Mapping[tuple[str, tuple[int, ...]], _StorageInfo]",
    files: Callable[[str], StoredFile],
    plain: PlainPickles,
) -> Chunk:
    shape, offsets, sizes = tuple(entry.size), tuple(chunk.offsets), tuple(chunk.sizes)
    if any(offsets[1:]) or sizes[1:] != shape[1:]:
        raise ExportError(
            f"{directory}: {name} has a chunk of shape {sizes} at offset {offsets}, but only tensors that are sharded by rows can "
            f"be exported."
        )
    info = storage.get((name, offsets))
    if info is None:
        raise ExportError(f"{directory / METADATA_FILE} does not say where {name} is. Export another checkpoint.")
    width, count = math.prod(shape[1:]), math.prod(sizes)
    file = files(info.relative_path)
    if file.num_bytes < info.offset + info.length:
        raise ExportError(
            f"{file.path} is truncated: {name} should end at byte {info.offset + info.length:,}. Export another checkpoint."
        )
    num_bytes = count * entry.properties.dtype.itemsize
    start = cache(partial(_data_start, file, name, info.offset, info.length, num_bytes, plain))
    return Chunk((offsets[0] if offsets else 0) * width, count, file, start, info.offset, info.length)


def _data_start(file: StoredFile, name: str, offset: int, length: int, num_bytes: int, plain: PlainPickles) -> int:
    """Return the offset in bytes at which a chunk's values begin in its `.distcp` file."""
    window = _Window(file.stream, offset, length)
    try:
        with zipfile.ZipFile(window) as archive:
            (data,) = [info for info in archive.infolist() if info.filename.split("/")[-2:-1] == ["data"]]
            (pickle,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            description = archive.read(pickle)  # identical for all tensors of the same shape
        if description not in plain:
            window.seek(0)
            described = torch.load(window, map_location="meta", weights_only=True)
            plain[description] = described.is_contiguous() and not described.storage_offset()
        if data.file_size != num_bytes or not plain[description]:
            raise ValueError(f"it is not stored as {num_bytes:,} contiguous bytes")
        header = bytearray(4)
        window.seek(data.header_offset + 26)  # in a zip local header: the lengths of its name and extra field
        window.readinto(header)
    except Exception as error:  # zipfile and torch raise many exception types for damaged archives
        raise ExportError(f"{file.path}: {name} cannot be read ({error}). Export another checkpoint.") from error
    name_bytes, extra_bytes = int.from_bytes(header[:2], "little"), int.from_bytes(header[2:], "little")
    return offset + data.header_offset + 30 + name_bytes + extra_bytes


def _join(directory: Path, name: str, entry: "TensorStorageMetadata", chunks: list[Chunk]) -> DcpTensor:
    """Join chunks into a tensor. If several chunks are replicas of the same range, use only one of them."""
    by_first = {chunk.first: chunk for chunk in chunks if chunk.count}
    ordered = tuple(by_first[first] for first in sorted(by_first))
    ends = [0, *(chunk.first + chunk.count for chunk in ordered)]
    if ends != [*(chunk.first for chunk in ordered), math.prod(entry.size)]:
        raise ExportError(f"{directory}: the chunks of {name} have a gap or an overlap. Export another checkpoint.")
    return DcpTensor(name, tuple(entry.size), entry.properties.dtype, ordered)
