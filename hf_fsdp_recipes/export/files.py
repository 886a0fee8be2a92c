"""Writes safetensors files one tensor at a time, in a background thread."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch

from hf_fsdp_recipes.checkpointing.writer import is_finite
from hf_fsdp_recipes.errors import ExportError, describe
from hf_fsdp_recipes.upstream.transformers_internals import str_to_torch_dtype

PathLike = str | os.PathLike[str]
Tensors = dict[str, torch.Tensor]

DTYPES = {**str_to_torch_dtype, "C64": torch.complex64}  # {name in safetensors files: dtype}


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
    text = json.dumps(
        entries,
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    positions = {name: len(header) + offset for name, offset in offsets.items()}
    return header, positions


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise an ExportError if a tensor contains NaN or infinity."""
    if not is_finite(tensor):
        raise ExportError(f"{name} contains NaN or infinity, so nothing was exported.")


class FileWriter:
    """Writes this rank's files. After an error, it ignores all further tensors.

    `close` raises the error.

    Args:
        directory: where the files are created.
        files: what to write to each file, as {file name: {tensor name: meta tensor}}.
    """

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, Tensors],
    ) -> None:
        self._directory = directory
        self._files = files
        # {tensor that is not written yet: its file}
        self._left = {name: file for file, tensors in files.items() for name in tensors}
        # {file that is begun but not complete: its stream}
        self._streams: dict[str, BinaryIO] = {}
        # {file that is begun: {tensor that is not written yet: its position}}
        self._positions: dict[str, dict[str, int]] = {}
        self._thread = ThreadPoolExecutor(1)
        self._previous: Future[None] | None = None
        self._error: Exception | None = None

    def submit(self, compute: Callable[[], Tensors]) -> None:
        """In the background, call `compute()` and write its tensors of this rank's files.

        If the previous call is unfinished, wait for it. So only one step waits or is written while
        the next step is gathered.
        """
        submitted = self._thread.submit(self._compute_and_write, compute)
        if self._previous:
            self._previous.result()
        self._previous = submitted

    def close(self) -> None:
        """Wait until all files are on disk. If there was an error, raise the first one."""
        self._thread.shutdown()
        for stream in self._streams.values():
            with self.recording_errors():
                stream.close()
        if self._error is not None:
            raise self._error
        if self._left:
            raise ExportError(
                f"{sorted(self._left)[:3]} were not written. Please report this as a bug."
            )

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        """If the block fails, do not raise the error here.

        `close` raises the first error that was recorded.
        """
        try:
            yield
        except OSError as error:
            self._error = self._error or ExportError(
                f"{self._directory} cannot be written: {describe(error)}."
            )
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

    def _write(
        self,
        file: str,
        name: str,
        tensor: torch.Tensor,
    ) -> None:
        planned = self._files[file][name]
        if tensor.shape != planned.shape:
            raise ExportError(
                f"{name} has shape {list(tensor.shape)}, not {list(planned.shape)} as planned."
            )
        tensor = tensor.to(planned.dtype)
        check_finite(name, tensor)
        if file not in self._streams:
            header, self._positions[file] = make_header(self._files[file])
            self._streams[file] = (self._directory / file).open("wb")
            self._streams[file].write(header)
        stream = self._streams[file]
        position = self._positions[file].pop(name)
        values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        stream.seek(position)
        stream.write(values)
        stream.flush()
        # The kernel starts to write to the disk now, while the next parameter is gathered.
        os.posix_fadvise(
            stream.fileno(),
            position,
            values.nbytes,
            os.POSIX_FADV_DONTNEED,
        )
        if not self._positions[file]:
            os.fsync(stream.fileno())
            del self._streams[file]
            stream.close()
