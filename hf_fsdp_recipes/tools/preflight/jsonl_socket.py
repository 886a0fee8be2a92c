"""A connection that carries one JSON value a line."""

import json
import select
import socket
import time
from typing import Any

_BLOCK_BYTES = 1 << 16
_SEND_SECONDS = 5.0


class Lines:
    """Values over a connected socket, each waited for no longer than asked."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._rest = b""

    def send(self, value: Any) -> None:
        """Send a value, within seconds or OSError."""
        self.stream.settimeout(_SEND_SECONDS)
        self.stream.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, deadline: float) -> Any:
        """Return the next value; ConnectionError if the other side left, TimeoutError at the deadline."""
        while b"\n" not in self._rest:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError
            self.stream.settimeout(left_seconds)
            self._read()
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def receive_ready(self) -> list[Any]:
        """Return the values that are complete after one read; ConnectionError if the other side left."""
        self._read()
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def is_ready(self, wait_seconds: float) -> bool:
        """Tell whether there is something to receive, if only the other side's leaving."""
        return b"\n" in self._rest or bool(select.select([self.stream], [], [], wait_seconds)[0])

    def _read(self) -> None:
        block = self.stream.recv(_BLOCK_BYTES)
        if not block:
            raise ConnectionResetError("the other side has left")
        self._rest += block
