"""Reads ranges of elements from torch DCP's `.distcp` files, whichever program wrote them.

A `.distcp` file is a sequence of uncompressed torch.save archives, each with one rank's chunk of one tensor. `.metadata`
records where each archive begins; the archive's zip directory records where the tensor's bytes begin. Tensors only.

Source: torch 2.13 `distributed/checkpoint/filesystem.py`, `metadata.py`; the torch.save archive format.
"""

import io
import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_recipes.checkpointing.dcp_metadata import read_dcp_metadata
from hf_fsdp_recipes.errors import CheckpointError, ExportError


@dataclass(frozen=True)
class Chunk:
    """Elements [first, first + count) of a tensor, as raw bytes at `start` of `file`."""

    first: int
    count: int
    file: Path
    start: int


@dataclass(frozen=True)
class DcpTensor:
    """One tensor of a checkpoint, with its chunks in the order of their elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return `count` elements starting at `start` (1-D, CPU)."""
        out = torch.empty(count, dtype=self.dtype)
        view = memoryview(out.view(torch.uint8).numpy())
        size = self.dtype.itemsize
        for chunk in self.chunks:
            low, high = max(start, chunk.first), min(start + count, chunk.first + chunk.count)
            if low < high:
                target = view[(low - start) * size : (high - start) * size]
                _read(chunk.file, chunk.start + (low - chunk.first) * size, target)
        return out


class _Window(io.RawIOBase):
    """A byte range of a file that zipfile and torch.load can read like a file."""

    def __init__(self, file: Path, start: int, length: int) -> None:
        self._stream = file.open("rb")
        self._start, self._length, self._at = start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(view)
        self._at += count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def find_directory(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint that holds the model's `.metadata`.

    Raises:
        ExportError: the checkpoint has no `.metadata`.
    """
    for candidate in (checkpoint / "pytorch_model_fsdp_0", checkpoint):
        if (candidate / ".metadata").is_file():
            return candidate
    raise ExportError(
        f"{checkpoint} holds no sharded model: neither it nor its pytorch_model_fsdp_0 has a .metadata file. Name a "
        f"checkpoint-<step> that was saved as SHARDED_STATE_DICT, or a directory of .distcp files."
    )


def read_index(directory: Path) -> dict[str, DcpTensor]:
    """Return the tensors of a DCP directory and where they are stored. Any process may call this.

    Raises:
        ExportError: the index cannot be read, a file is missing or truncated, or a tensor is not sharded by rows.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = read_dcp_metadata(directory)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    try:
        storage: dict[tuple[str, tuple[int, ...]], Any] = {}
        for index, info in (metadata.storage_data or {}).items():
            storage[(index.fqn, tuple(index.offset or ()))] = info
        tensors = {}
        plain: dict[bytes, bool] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                shape = tuple(entry.size)
                dtype = entry.properties.dtype
                chunks = [_chunk(directory, name, shape, dtype, chunk, storage, plain) for chunk in entry.chunks]
                tensors[name] = _checked(directory, DcpTensor(name, shape, dtype, _in_order(chunks)))
        return tensors
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ExportError(f"{directory}/.metadata is damaged ({error!r}). Export another checkpoint.") from error


def _chunk(
    directory: Path,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    chunk: Any,
    storage: Any,
    plain: dict[bytes, bool],
) -> Chunk:
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    if any(offsets[1:]) or sizes[1:] != shape[1:]:
        raise ExportError(
            f"{directory}: {name} has a chunk of {sizes} at {offsets}; only tensors sharded by rows can be exported."
        )
    info = storage[(name, offsets)]
    width, count = math.prod(shape[1:]), math.prod(sizes)
    file = directory / info.relative_path
    start = 0 if count == 0 else _data_start(file, name, info.offset, info.length, count * dtype.itemsize, plain)
    return Chunk((offsets[0] if offsets else 0) * width, count, file, start)


def _data_start(file: Path, name: str, offset: int, length: int, num_bytes: int, plain: dict[bytes, bool]) -> int:
    """Return the first byte of a chunk's values in its `.distcp` file; `plain` caches which pickles are plain tensors."""
    if not file.is_file() or file.stat().st_size < offset + length:
        raise ExportError(f"{file} is missing or truncated: {name} should end at byte {offset + length:,}.")
    try:
        with _Window(file, offset, length) as window, zipfile.ZipFile(window) as archive:
            (data,) = [info for info in archive.infolist() if info.filename.split("/")[-2:-1] == ["data"]]
            (pickle,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            description = archive.read(pickle)  # identical for all tensors of the same shape
            if description not in plain:
                window.seek(0)
                described = torch.load(window, map_location="meta", weights_only=True)
                plain[description] = described.is_contiguous() and not described.storage_offset()
            if data.file_size != num_bytes or not plain[description]:
                raise ExportError(f"{file}: {name} is not stored as {num_bytes:,} contiguous bytes")
            header = bytearray(4)
            window.seek(data.header_offset + 26)  # lengths of the local header's name and extra field
            window.readinto(header)
    except (zipfile.BadZipFile, ValueError, RuntimeError, OSError) as error:
        raise ExportError(f"{file}: {name} cannot be read ({error})") from error
    name_bytes, extra_bytes = int.from_bytes(header[:2], "little"), int.from_bytes(header[2:], "little")
    return offset + data.header_offset + 30 + name_bytes + extra_bytes


def _in_order(chunks: list[Chunk]) -> tuple[Chunk, ...]:
    # Replicas may be listed too; the first chunk of each range is enough.
    by_first: dict[int, Chunk] = {}
    for chunk in chunks:
        if chunk.count:
            by_first.setdefault(chunk.first, chunk)
    return tuple(by_first[first] for first in sorted(by_first))


def _checked(directory: Path, tensor: DcpTensor) -> DcpTensor:
    end = 0
    for chunk in tensor.chunks:
        if chunk.first != end:
            raise ExportError(f"{directory}: {tensor.name} has a gap or an overlap at element {end:,}")
        end += chunk.count
    if end != math.prod(tensor.shape):
        raise ExportError(f"{directory}: {tensor.name} has {end:,} of {math.prod(tensor.shape):,} elements")
    return tensor


def _read(file: Path, offset: int, view: memoryview) -> None:
    descriptor = _descriptor(file)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise ExportError(f"{file} ended at byte {offset:,}: it changed while it was being read")
        view, offset = view[count:], offset + count


_descriptors: dict[Path, int] = {}


def _descriptor(file: Path) -> int:
    if file not in _descriptors:
        _descriptors[file] = os.open(file, os.O_RDONLY)
    return _descriptors[file]


def close_all() -> None:
    """Close the files that were opened for reading."""
    for descriptor in _descriptors.values():
        os.close(descriptor)
    _descriptors.clear()
