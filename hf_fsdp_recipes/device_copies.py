"""Copies between host memory and an accelerator, through pinned memory and on a stream of their own.

The calling thread reads or writes files meanwhile, and training's stream is not used. Each object belongs to one thread. For
tensors in host memory nothing is copied.
"""

import contextlib
from collections.abc import Iterator

import torch

NUM_BUFFERS = 2


class Upload:
    """Host buffers whose content goes to one device.

    Args:
        device: where the bytes go.
        num_bytes: size of a buffer.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._buffers = torch.empty((NUM_BUFFERS, num_bytes), dtype=torch.uint8, pin_memory=self._stream is not None)
        self._uploaded: list[torch.Event | None] = [None] * NUM_BUFFERS
        self._next = 0
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(device))

    @property
    def is_asynchronous(self) -> bool:
        """Whether bytes are copied to an accelerator while the calling thread goes on."""
        return self._stream is not None

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of the next free buffer; waits for the upload of what it held."""
        uploaded = self._uploaded[self._next]
        if uploaded is not None:
            uploaded.synchronize()
        return self._buffers[self._next, :num_bytes]

    @contextlib.contextmanager
    def uploaded(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give the bytes of the last buffer on the device; all work of the block is queued on the upload's stream."""
        if self._stream is None:
            yield buffer
            return
        with self._stream:
            yield buffer.to(self._device, non_blocking=True)
        self._uploaded[self._next] = self._stream.record_event()
        self._next = (self._next + 1) % NUM_BUFFERS

    def finish(self) -> None:
        """Let the device's later work wait for all uploads."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


class Download:
    """Host buffers for values that are on any device.

    Args:
        num_bytes: size of a buffer.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._stream: torch.Stream | None = None
        self._buffers: torch.Tensor | None = None
        self._next = 0

    def to_host(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return 1-D values in host memory, cast to `dtype`. Valid until two more calls."""
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
