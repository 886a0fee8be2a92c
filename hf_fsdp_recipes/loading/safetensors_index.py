"""Locates the tensors of a safetensors checkpoint on disk and reads byte ranges of them.

The index is built from the files' headers alone and fully checked, so a corrupt checkpoint is reported before a weight is read.

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from hf_fsdp_recipes.errors import LoadError, summarize

if TYPE_CHECKING:
    from hf_fsdp_recipes.loading.dequantize import Fp8Weight, Mxfp4Weight

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
IN_MEMORY = Path("<in memory>")
PREFETCH_BYTES = 64 * 1024 * 1024  # enough read-ahead to keep a disk busy
PREFETCH_REQUEST_BYTES = 4 * 1024 * 1024  # per system call

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in one file: `num_bytes` from byte `start` of the file, row-major, little-endian.

    If `quantized` is set, `SafetensorsIndex.read_into` dequantizes the weight, and `dtype`, `shape` and
    `num_bytes` are those of the result.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    quantized: "Fp8Weight | Mxfp4Weight | None" = None


def stored_in_memory(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
    """Describe a tensor that is not in a file, such as newly initialized weights."""
    return StoredTensor(name, IN_MEMORY, dtype, shape, 0, math.prod(shape) * dtype.itemsize)


InMemory: TypeAlias = torch.Tensor | Callable[[], torch.Tensor]  # values, or a function that creates them
ByteRange = tuple[StoredTensor, int, int]  # (tensor, first byte within it, number of bytes)


class SafetensorsIndex:
    """The tensors of a checkpoint by name. Files are opened on the first read and stay open until `close`."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()  # reads come from several threads
        self._in_memory: dict[str, InMemory] = {}

    def add_in_memory(self, tensor: StoredTensor, values: InMemory) -> None:
        """Add a tensor that `stored_in_memory` describes. If `values` is a function, every read calls it to get the values."""
        self.tensors[tensor.name] = tensor
        self._in_memory[tensor.name] = values

    def read_into(self, buffer: torch.Tensor, tensor: StoredTensor, start_bytes: int) -> None:
        """Fill `buffer` (1-D uint8, CPU) with a tensor's bytes from `start_bytes` on; raise a LoadError if the file ends early."""
        if tensor.name in self._in_memory:
            values = self._in_memory[tensor.name]
            values = values if isinstance(values, torch.Tensor) else values()
            stored = values.contiguous().reshape(-1).view(torch.uint8)
            buffer.copy_(stored[start_bytes : start_bytes + buffer.numel()])
            return
        if tensor.quantized is not None:
            start, count = (num_bytes // tensor.dtype.itemsize for num_bytes in (start_bytes, buffer.numel()))
            buffer.copy_(tensor.quantized.read(self, start, count, tensor.dtype).view(torch.uint8))
            return
        view = memoryview(buffer.numpy())
        offset = tensor.start + start_bytes
        while view:
            num_read = os.preadv(self._descriptor(tensor.file), [view], offset)
            if num_read == 0:
                raise LoadError(
                    f"{tensor.file} ended at byte {offset}, inside tensor {tensor.name!r}: it changed while it was being read. "
                    f"Restore the file and start again."
                )
            view, offset = view[num_read:], offset + num_read

    def prefetch(self, tensor: StoredTensor, start_bytes: int, num_bytes: int) -> None:
        """Ask the operating system to read bytes that are needed soon, unless they are cached. Does not wait for them."""
        if tensor.name in self._in_memory or not hasattr(os, "posix_fadvise"):
            return
        if tensor.quantized is not None:
            stored_bytes = tensor.quantized.packed.num_bytes
            start_bytes, num_bytes = (part * stored_bytes // tensor.num_bytes for part in (start_bytes, num_bytes))
        with contextlib.suppress(
            OSError
        ):  # only a hint, which some file systems reject; the read itself reports errors
            descriptor, first = self._descriptor(tensor.file), tensor.start + start_bytes
            if num_bytes and not _is_cached(descriptor, first + num_bytes - 1):
                os.posix_fadvise(descriptor, first, num_bytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close all files and drop tensors held in memory."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}
        self._in_memory = {}

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]


class Prefetcher:
    """Asks the operating system to read the given byte ranges, up to PREFETCH_BYTES before they are used. Not thread-safe."""

    def __init__(self, index: SafetensorsIndex, ranges: Iterable[ByteRange]) -> None:
        self._index = index
        self._requests = _split(ranges)
        self._num_bytes = 0  # requested but not read yet
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """Note that `num_bytes` have been read, and request as many more."""
        self._num_bytes -= num_bytes
        while self._num_bytes < PREFETCH_BYTES and (request := next(self._requests, None)):
            self._index.prefetch(*request)
            self._num_bytes += request[2]


def _split(ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    for tensor, start, num_bytes in ranges:
        for offset in range(0, num_bytes, PREFETCH_REQUEST_BYTES):
            yield tensor, start + offset, min(PREFETCH_REQUEST_BYTES, num_bytes - offset)


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    # Not cached, or RWF_NOWAIT is not supported by the file system or by this Python's libc.
    except (OSError, AttributeError, NotImplementedError):
        return False


def open_index(directory: Path) -> SafetensorsIndex:
    """Read the headers of a local safetensors checkpoint; raise a LoadError if there is none or it is corrupt."""
    files, expected = _find_files(directory)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if expected is None or expected.get(tensor.name) == file:
                tensors[tensor.name] = tensor
    missing = sorted(set(expected or ()) - set(tensors))
    if expected is not None and missing:
        raise LoadError(
            f"{directory / INDEX_FILE} lists {missing[0]!r} in {expected[missing[0]].name}, which does not contain it "
            f"({len(missing)} such tensors). Download the checkpoint again."
        )
    return SafetensorsIndex(tensors.values())


def read_header(file: Path) -> list[StoredTensor]:
    """Read the header of a safetensors file; raise a LoadError if the file is damaged or in another format."""
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
    tensors = []
    try:
        with safe_open(file, "pt") as opened:  # checks that the tensors fill the file
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                dtype, shape = DTYPES[part.get_dtype()], tuple(part.get_shape())
                num_bytes = math.prod(shape) * dtype.itemsize
                tensors.append(StoredTensor(name, file, dtype, shape, start, num_bytes))
                start += num_bytes
    except (SafetensorError, KeyError) as error:
        problem = f"its header cannot be read, or its tensors do not fill its {file.stat().st_size:,} bytes"
        raise _broken(file, f"{problem} ({summarize(error)})") from error
    return tensors


def _find_files(directory: Path) -> tuple[list[Path], dict[str, Path] | None]:
    if (directory / SINGLE_FILE).is_file():  # before the index, as in from_pretrained
        return [directory / SINGLE_FILE], None
    if (directory / INDEX_FILE).is_file():
        return _read_weight_map(directory)
    for name in PICKLE_FILES:
        if (directory / name).is_file():
            raise LoadError(
                f"{directory} has {name}, a pickle, which can run code and cannot be read in byte ranges. Convert it to "
                f"safetensors with from_pretrained and save_pretrained."
            )
    raise LoadError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}. Check the path.")


def _read_weight_map(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    index = directory / INDEX_FILE
    try:
        weight_map = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(index, f"it has no weight_map ({error!r})") from error
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise _broken(index, f"it lists {file!r}, which is not a file name in its directory")
        if not (directory / file).is_file():
            raise _broken(index, f"it lists {file!r}, which does not exist")
    files = sorted({directory / file for file in weight_map.values()})
    return files, {name: directory / file for name, file in weight_map.items()}


def _broken(file: Path, problem: str) -> LoadError:
    return LoadError(f"{file} is broken: {problem}. Download or copy it again.")
