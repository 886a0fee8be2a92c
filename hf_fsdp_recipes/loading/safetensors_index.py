"""Where each tensor of a safetensors checkpoint lies: names, shapes, dtypes and byte ranges, from headers only.

Reads no weights on its own; `read_into` fetches the bytes somebody asks for. Checks everything that could
make a later read return the wrong bytes, so that a broken checkpoint is named before any rank waits.

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_fsdp_recipes.errors import LoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
COPIED_BYTES = 64 * 1024  # at once into a pipe, where the file system cannot splice
AHEAD_BYTES = 64 * 1024 * 1024  # how much a disk is asked for before it is read; what it takes to keep one busy
ASKED_BYTES = 4 * 1024 * 1024  # of that, at once
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference reader

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
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in one file: `num_bytes` from `start` (absolute, bytes), row-major, little-endian."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


Run = tuple[StoredTensor, int, int]  # (tensor, first byte of it, number of bytes)


class SafetensorsIndex:
    """The tensors of a safetensors checkpoint by name. Files are opened on the first read and kept open."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()  # several threads read
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self, tensor: StoredTensor, values: torch.Tensor) -> None:
        """Serve a tensor that is in no file from memory, like the others."""
        self.tensors[tensor.name] = tensor
        self._kept[tensor.name] = values.contiguous().reshape(-1).view(torch.uint8)

    def read_into(self, buffer: torch.Tensor, tensor: StoredTensor, start_bytes: int) -> None:
        """Fill `buffer` (uint8, 1-D, on CPU) with the bytes of `tensor` from `start_bytes` on.

        Raises:
            LoadError: if the file ends early, which it did not when its header was checked.
        """
        if tensor.name in self._kept:
            buffer.copy_(self._kept[tensor.name][start_bytes : start_bytes + buffer.numel()])
            return
        view = memoryview(buffer.numpy())
        offset = tensor.start + start_bytes
        while view:
            num_read = os.preadv(self._descriptor(tensor.file), [view], offset)
            if num_read == 0:
                raise _ended(tensor, offset)
            view, offset = view[num_read:], offset + num_read

    def splice_into(self, pipe: int, tensor: StoredTensor, start_bytes: int, num_bytes: int) -> int:
        """Put bytes of `tensor` from `start_bytes` on into a pipe; return how many of `num_bytes` it took.

        They stay the kernel's: this process neither copies nor holds them.

        Raises:
            BlockingIOError: the pipe is full.
            BrokenPipeError: nobody is at its other end.
            LoadError: as `read_into`.
        """
        if tensor.name in self._kept:
            return os.write(pipe, self._kept[tensor.name][start_bytes : start_bytes + num_bytes].numpy())
        descriptor, offset = self._descriptor(tensor.file), tensor.start + start_bytes
        try:
            num_moved = os.splice(descriptor, pipe, num_bytes, offset_src=offset)
        except (BlockingIOError, BrokenPipeError):
            raise
        except OSError:  # a file system that cannot, or a sandbox that forbids it; a sick disk says so once more
            num_moved = os.write(pipe, os.pread(descriptor, min(num_bytes, COPIED_BYTES), offset))
        if num_moved == 0:
            raise _ended(tensor, offset)
        return num_moved

    def ask_for(self, tensor: StoredTensor, start_bytes: int, num_bytes: int) -> None:
        """Have the kernel begin to read bytes that will be read soon, unless it has them; return at once."""
        if tensor.name in self._kept or not hasattr(os, "posix_fadvise"):
            return
        descriptor, first = self._descriptor(tensor.file), tensor.start + start_bytes
        if num_bytes and not _is_cached(descriptor, first + num_bytes - 1):
            with contextlib.suppress(OSError):  # advice only
                os.posix_fadvise(descriptor, first, num_bytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}
        self._kept = {}

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]


class ReadAhead:
    """Asks for runs of bytes some way ahead of the one that is read. Not for two threads."""

    def __init__(self, checkpoint: SafetensorsIndex, runs: Iterable[Run]) -> None:
        self._checkpoint = checkpoint
        self._parts = _in_parts(runs)
        self._num_bytes = 0  # asked for and not read yet
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """Learn that so many bytes have been read, and ask for more."""
        self._num_bytes -= num_bytes
        while self._num_bytes < AHEAD_BYTES and (part := next(self._parts, None)):
            self._checkpoint.ask_for(*part)
            self._num_bytes += part[2]


def _in_parts(runs: Iterable[Run]) -> Iterator[Run]:
    for tensor, start, num_bytes in runs:
        for offset in range(0, num_bytes, ASKED_BYTES):
            yield tensor, start + offset, min(ASKED_BYTES, num_bytes - offset)


def _is_cached(descriptor: int, offset: int) -> bool:
    """Tell whether a byte of a file is in memory, as far as the kernel says so."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    # Not in memory; a file system that cannot tell; a Python that was built where nobody could ask.
    except (OSError, AttributeError, NotImplementedError):
        return False


def open_checkpoint(directory: Path) -> SafetensorsIndex:
    """Read the headers of the safetensors checkpoint in a local directory. Any rank, no collective.

    Raises:
        LoadError: no checkpoint, a pickled one, an index that points outside the directory or at a missing
            file or tensor, a file that is truncated or whose header does not describe its bytes.
    """
    files, expected = _find_files(directory)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if expected is None or expected.get(tensor.name) == file:
                tensors[tensor.name] = tensor
    missing = sorted(set(expected or ()) - set(tensors))
    if missing:
        raise LoadError(
            f"{directory / INDEX_FILE} lists {missing[0]!r} in {expected[missing[0]].name}, which does not hold it "  # type: ignore[index]
            f"({len(missing)} such tensors). Rule: the index must match its files. Remedy: download the checkpoint again."
        )
    return SafetensorsIndex(tensors.values())


def read_header(file: Path) -> list[StoredTensor]:
    """Read and check the header of one safetensors file.

    Raises:
        LoadError: the file is not safetensors, is truncated, or its header and its bytes disagree.
    """
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if file_bytes < 8 or header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
            raise _broken(file, f"its header claims {header_bytes} bytes and the file has {file_bytes}")
        try:
            header = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise _broken(file, f"its header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = [_stored_tensor(file, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.num_bytes))
    end = data_start
    for tensor in tensors:
        if tensor.start != end:
            raise _broken(file, f"tensor {tensor.name!r} starts at byte {tensor.start}, not at {end}")
        end += tensor.num_bytes
    if end != file_bytes:
        raise _broken(file, f"its tensors end at byte {end} and the file at {file_bytes}")
    return tensors


def _stored_tensor(file: Path, name: str, entry: dict, data_start: int) -> StoredTensor:
    try:
        dtype, shape = DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(file, f"the entry of tensor {name!r} cannot be read ({error!r})") from error
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes or min(begin, *shape, 0) < 0:
        raise _broken(file, f"tensor {name!r} of shape {list(shape)} needs {num_bytes} bytes and has {end - begin}")
    return StoredTensor(name, file, dtype, shape, data_start + begin, num_bytes)


def _find_files(directory: Path) -> tuple[list[Path], dict[str, Path] | None]:
    if (directory / INDEX_FILE).is_file():
        return _read_index(directory)
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE], None
    for name in PICKLE_FILES:
        if (directory / name).is_file():
            raise LoadError(
                f"{directory} holds {name}, a pickle. Rule: only safetensors are read (a pickle can run code and cannot "
                f"be read by ranges). Remedy: convert it once, with from_pretrained and save_pretrained."
            )
    raise LoadError(
        f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}. Rule: a model directory holds config.json and "
        f"safetensors. Remedy: check the path."
    )


def _read_index(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    index = directory / INDEX_FILE
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        places = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(index, f"it holds no weight_map ({error!r})") from error
    for file in sorted(set(places.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise _broken(index, f"it names {file!r}, which is not a plain file name in its directory")
        if not (directory / file).is_file():
            raise _broken(index, f"it names {file!r}, which is not there")
    return sorted({directory / file for file in places.values()}), {n: directory / f for n, f in places.items()}


def _ended(tensor: StoredTensor, offset: int) -> LoadError:
    return LoadError(
        f"{tensor.file} ends at byte {offset}, inside tensor {tensor.name!r}. Rule: a checkpoint must not change while it "
        f"is read. Remedy: restore the file and start again."
    )


def _broken(file: Path, fault: str) -> LoadError:
    return LoadError(f"{file} is broken: {fault}. Remedy: download or copy it again.")
