"""Writes safetensors files one tensor at a time, in a background thread."""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from transformers.modeling_utils import str_to_torch_dtype

from hf_fsdp_recipes.checkpointing.writer import is_finite
from hf_fsdp_recipes.errors import ExportError, describe

Tensors = dict[str, torch.Tensor]

DTYPES = {**str_to_torch_dtype, "C64": torch.complex64}  # {name in safetensors files: dtype}
# Maximum number of export steps that wait or are written while the next step is gathered.
IN_FLIGHT = 1


def make_header(tensors: Tensors) -> tuple[bytes, dict[str, int]]:
    """Return a file's header, and the position of each tensor in the file.

    Wider dtypes come first, so all tensors are aligned.
    """
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offsets = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor = tensors[name]
        offsets[name] = end
        end += tensor.nbytes
        entries[name] = {
            "dtype": dtype_names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    positions = {name: len(header) + offset for name, offset in offsets.items()}
    return header, positions


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise an ExportError if a tensor contains NaN or infinity."""
    if not is_finite(tensor):
        raise ExportError(f"{name} contains NaN or infinity, so nothing was exported.")


@dataclass
class _OpenFile:
    stream: BinaryIO
    missing: dict[str, int]  # the tensors that are not written yet, and their positions


class FileWriter:
    """Writes this rank's files. After an error, it ignores all further tensors.

    `close` raises the error.

    Args:
        directory: where the files are created.
        files: what to write to each file, as {file name: {tensor name: meta tensor}}.
    """

    def __init__(self, directory: Path, files: Mapping[str, Tensors]) -> None:
        self._directory = directory
        self._files = files
        # {tensor that is not written yet: its file}
        self._left = {name: file for file, tensors in files.items() for name in tensors}
        self._open: dict[str, _OpenFile] = {}
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()
        self._error: Exception | None = None

    def submit(self, compute: Callable[[], Tensors]) -> None:
        """In the background, call `compute()` and write its tensors of this rank's files.

        If more than `IN_FLIGHT` calls are unfinished, wait for the oldest one.
        """
        self._pending.append(self._thread.submit(self._compute_and_write, compute))
        while len(self._pending) > IN_FLIGHT:
            self._pending.popleft().result()

    def close(self) -> None:
        """Wait until all files are on disk. If there was an error, raise the first one."""
        self._thread.shutdown()
        for unfinished in self._open.values():
            with self.recording_errors():
                unfinished.stream.close()
        if self._error is not None:
            raise self._error
        if self._left:
            names = sorted(self._left)[:3]
            raise ExportError(f"{names} were not written. Please report this as a bug.")

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        """If the block fails, do not raise the error here.

        `close` raises the first error that was recorded.
        """
        try:
            yield
        except OSError as error:
            text = f"{self._directory} cannot be written: {describe(error)}."
            self._error = self._error or ExportError(text)
        except Exception as error:
            self._error = self._error or error

    @torch.no_grad()  # grad mode is per thread
    def _compute_and_write(self, compute: Callable[[], Tensors]) -> None:
        with self.recording_errors():
            if self._error is not None:
                return
            for name, tensor in compute().items():
                if name in self._left:
                    self._write(self._left.pop(name), name, tensor)

    def _write(self, file: str, name: str, tensor: torch.Tensor) -> None:
        planned = self._files[file][name]
        if tensor.shape != planned.shape:
            raise ExportError(
                f"{name} has shape {list(tensor.shape)}, not {list(planned.shape)} as planned."
            )
        tensor = tensor.to(planned.dtype)
        check_finite(name, tensor)
        opened = self._open.get(file) or self._start(file)
        stream = opened.stream
        position = opened.missing.pop(name)
        values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        stream.seek(position)
        stream.write(values)
        stream.flush()
        # The kernel starts to write to the disk now, while the next parameter is gathered.
        os.posix_fadvise(stream.fileno(), position, values.nbytes, os.POSIX_FADV_DONTNEED)
        if not opened.missing:
            os.fsync(stream.fileno())
            del self._open[file]
            stream.close()

    def _start(self, file: str) -> _OpenFile:
        header, positions = make_header(self._files[file])
        opened = _OpenFile((self._directory / file).open("wb"), positions)
        self._open[file] = opened  # before anything is written, so that `close` closes it
        opened.stream.write(header)
        return opened
