"""Writes safetensors files one tensor at a time, in a background thread."""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch

from hf_fsdp_recipes.checkpointing.writer import is_finite
from hf_fsdp_recipes.errors import ExportError, describe
from hf_fsdp_recipes.upstream.transformers_internals import str_to_torch_dtype

DTYPES = {**str_to_torch_dtype, "C64": torch.complex64}  # {name in safetensors files: dtype}
IN_FLIGHT = (
    1  # maximum number of export steps that wait or are written while the next step is gathered
)


def make_header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return a file's header, and the position of each tensor in the file. Wider dtypes come first, so all are aligned."""
    dtypes = {dtype: text for text, dtype in DTYPES.items()}
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        value, offsets[name] = tensors[name], end
        end += value.nbytes
        header[name] = {
            "dtype": dtypes[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {
        name: 8 + len(text) + at for name, at in offsets.items()
    }


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise an ExportError if a tensor contains NaN or infinity."""
    if not is_finite(tensor):
        raise ExportError(f"{name} contains NaN or infinity, so nothing was exported.")


class FileWriter:
    """Writes this rank's files. After an error, it ignores all further tensors. `close` raises the error.

    Args:
        directory: where the files are created.
        files: what to write to each file, as {file name: {tensor name: meta tensor}}.
    """

    def __init__(self, directory: Path, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._directory, self._files = directory, files
        self._left = {
            name: file for file, tensors in files.items() for name in tensors
        }  # tensors not written yet
        self._open: dict[
            str, tuple[BinaryIO, dict[str, int]]
        ] = {}  # open files, with positions of missing tensors
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()
        self._error: Exception | None = None

    def submit(self, compute: Callable[[], dict[str, torch.Tensor]]) -> None:
        """In the background, call `compute()` and write those of its tensors that belong to this rank's files.

        If more than `IN_FLIGHT` calls are unfinished, wait for the oldest one.
        """
        self._pending.append(self._thread.submit(self._compute_and_write, compute))
        while len(self._pending) > IN_FLIGHT:
            self._pending.popleft().result()

    def close(self) -> None:
        """Wait until all files are on disk. If there was an error, raise the first one."""
        self._thread.shutdown()
        for started, _ in self._open.values():
            with self.recording_errors():
                started.close()
        if self._error is not None:
            raise self._error
        if self._left:
            raise ExportError(
                f"{sorted(self._left)[:3]} were not written. Please report this as a bug."
            )

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        """If the block fails, do not raise the error here. `close` raises the first error that was recorded."""
        try:
            yield
        except OSError as error:
            self._error = self._error or ExportError(
                f"{self._directory} cannot be written: {describe(error)}."
            )
        except Exception as error:
            self._error = self._error or error

    @torch.no_grad()  # grad mode is per thread
    def _compute_and_write(self, compute: Callable[[], dict[str, torch.Tensor]]) -> None:
        with self.recording_errors():
            if self._error is None:
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
        if file not in self._open:
            header, positions = make_header(self._files[file])
            self._open[file] = (self._directory / file).open("wb"), positions
            self._open[file][0].write(header)
        started, positions = self._open[file]
        start, values = (
            positions.pop(name),
            tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy(),
        )
        started.seek(start)
        started.write(values)
        started.flush()
        # The kernel starts to write to the disk now, while the next parameter is gathered.
        os.posix_fadvise(started.fileno(), start, values.nbytes, os.POSIX_FADV_DONTNEED)
        if not positions:
            os.fsync(started.fileno())
            self._open.pop(file)[0].close()
