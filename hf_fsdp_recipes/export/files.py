"""Writes safetensors files one tensor at a time, in a background thread."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hf_fsdp_recipes.errors import ExportError, describe
from hf_fsdp_recipes.weights.files import DTYPE_NAMES
from hf_fsdp_recipes.weights.values import is_finite

PathLike = str | os.PathLike[str]
Tensors = dict[str, Tensor]
OptionalDtype = torch.dtype | None  # None: each tensor keeps its own


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise an ExportError if a tensor contains NaN or infinity."""
    if not is_finite(tensor):
        raise ExportError(f"{name} contains NaN or infinity, so nothing was exported.")


class FileWriter:
    """Writes this rank's files. After an error, it ignores all further tensors.

    `close` raises the error.

    Args:
        directory: where the files are created.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[BinaryIO] = []
        # {tensor that is not written yet: its file, its position there, and its meta tensor}
        self._left: dict[str, tuple[BinaryIO, int, Tensor]] = {}
        self._thread = ThreadPoolExecutor(1)
        self._previous: Future[None] | None = None
        self._error: Exception | None = None

    def begin(self, file: str, tensors: Tensors) -> None:
        """Create a file for tensors, which are given on meta."""
        # Wider dtypes come first, so all tensors are aligned.
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in ordered:
            start = end
            end += tensor.nbytes
            entries[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(
            entries,
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        position = len(header)
        with self.recording_errors():
            # Closing a file on NFS waits for the server, so each one stays open until `close`.
            stream = (self._directory / file).open("wb")
            self._files.append(stream)
            stream.write(header)
            for name, tensor in ordered:
                self._left[name] = (stream, position, tensor)
                position += tensor.nbytes

    def submit(self, compute: Callable[[], Tensors]) -> None:
        """In the background, call `compute()` and write its tensors of this rank's files.

        If the previous call is unfinished, wait for it. So only one step waits or is written while
        the next step is gathered.
        """
        if self._previous:
            self._previous.result()
        self._previous = self._thread.submit(self._compute_and_write, compute)

    def close(self) -> None:
        """Wait until all files are on disk. If there was an error, raise the first one."""
        self._thread.shutdown()
        for stream in self._files:
            with self.recording_errors(), stream:
                stream.flush()
                os.fsync(stream.fileno())
        if self._error is not None:
            raise self._error
        if self._left:
            raise ExportError(
                f"{sorted(self._left)[:3]} were not written. Please report this as a bug."
            )

    @contextmanager
    def recording_errors(self) -> Iterator[None]:
        """If the block fails, do not raise the error here.

        `close` raises the first error that was recorded.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError):
                error = ExportError(f"{self._directory} cannot be written: {describe(error)}.")
            self._error = self._error or error

    @torch.no_grad()  # grad mode is per thread
    def _compute_and_write(self, compute: Callable[[], Tensors]) -> None:
        with self.recording_errors():
            if self._error is not None:
                return
            for name, tensor in compute().items():
                if name in self._left:
                    self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        stream, position, planned = self._left.pop(name)
        if tensor.shape != planned.shape:
            raise ExportError(
                f"{name} has shape {list(tensor.shape)}, not {list(planned.shape)} as planned."
            )
        tensor = tensor.to(planned.dtype)
        check_finite(name, tensor)
        values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        stream.seek(position)
        stream.write(values)
        stream.flush()
        # The kernel starts to write to the disk now, while the next parameter is gathered.
        os.posix_fadvise(stream.fileno(), position, values.nbytes, os.POSIX_FADV_DONTNEED)
