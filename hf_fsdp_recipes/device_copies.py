"""Copies tensors between host memory and an accelerator, through pinned memory and on a separate stream.

While an upload runs, the calling thread can read files; a download blocks the thread until the copy is done. The stream that
training uses stays free. Use each instance from one thread only. Tensors that are already in host memory are not copied.
"""

import contextlib
from collections.abc import Iterator

import torch

NUM_BUFFERS = 2


class Upload:
    """Host buffers whose content is copied to one device.

    Args:
        device: target of the copies.
        num_bytes: size of each buffer.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._buffers = torch.empty((NUM_BUFFERS, num_bytes), dtype=torch.uint8, pin_memory=self._stream is not None)
        self._uploaded: list[torch.Event | None] = [None] * NUM_BUFFERS
        self._next = 0
        self.start()

    def start(self) -> None:
        """Make uploads wait for the device's earlier work, which may still use the memory that uploads overwrite."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    @property
    def is_asynchronous(self) -> bool:
        """Whether bytes are copied to an accelerator while the calling thread continues."""
        return self._stream is not None

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Wait until the next buffer's previous content is uploaded, and return the buffer's first `num_bytes` bytes."""
        uploaded = self._uploaded[self._next]
        if uploaded is not None:
            uploaded.synchronize()
        return self._buffers[self._next, :num_bytes]

    @contextlib.contextmanager
    def uploaded(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a device copy of `buffer`, the latest result of `buffer()`. Kernels of the block run on the upload's stream."""
        if self._stream is None:
            yield buffer
            return
        with self._stream:
            yield buffer.to(self._device, non_blocking=True)
        self._uploaded[self._next] = self._stream.record_event()
        self._next = (self._next + 1) % NUM_BUFFERS

    def finish(self) -> None:
        """Wait for all uploads on the device: kernels that are queued after this call run after them."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


class Download:
    """Host buffers that receive values from any device.

    Args:
        num_bytes: size of each buffer.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._stream: torch.Stream | None = None
        self._buffers: torch.Tensor | None = None
        self._next = 0

    def to_host(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return 1-D `values` in host memory, cast to `dtype`. The result is valid until the next call but one."""
        if values.device.type == "cpu":
            return values.to(dtype).contiguous()
        if self._stream is None or self._buffers is None:
            self._stream = torch.Stream(values.device)
            self._buffers = torch.empty((NUM_BUFFERS, self._num_bytes), dtype=torch.uint8, pin_memory=True)
        self._stream.wait_stream(torch.accelerator.current_stream(values.device))
        host = self._buffers[self._next, : values.numel() * dtype.itemsize].view(dtype)
        self._next = (self._next + 1) % NUM_BUFFERS
        with self._stream:
            host.copy_(values.to(dtype), non_blocking=True)
        self._stream.synchronize()
        return host
