"""Starts one process a local rank that looks at its device and, when told to, measures with the others.

Processes of their own, so that the preflight needs no torch and a collective that hangs can be ended.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import addresses
from hf_fsdp_recipes.tools.preflight.jsonl_socket import Lines
from hf_fsdp_recipes.tools.preflight.rendezvous import Seat


class Workers:
    """The measuring processes of one participant; use it as a context, which ends them.

    Attributes:
        place: (address, port) of the store that they meet at; number 0's only.
    """

    def __init__(self, seat: Seat, on_cpu: bool) -> None:
        self._seat = seat
        self._listener = None
        self.place: tuple[str, int] | None = None
        if seat.number == 0:
            address = seat.master_address if addresses.is_own(seat.master_address) else socket.gethostname()
            self._listener = addresses.listen(address, 0)
            self.place = (address, self._listener.getsockname()[1])
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Lines] = []
        self._logs = [tempfile.TemporaryFile() for _ in seat.local_ranks]  # noqa: SIM115, closed in __exit__
        for local_rank, log in zip(seat.local_ranks, self._logs, strict=True):
            self._start(local_rank, log, on_cpu)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for lines in self._lines:
            lines.stream.close()
        for process in self._processes:
            process.kill()
            process.wait()
        for log in self._logs:
            log.close()
        if self._listener is not None:
            self._listener.close()

    def _start(self, local_rank: int, log: Any, on_cpu: bool) -> None:
        ours, theirs = socket.socketpair()
        is_host = self._listener is not None and local_rank == self._seat.local_ranks[0]
        listener = self._listener.fileno() if self._listener is not None and is_host else -1
        command = [
            sys.executable,
            "-m",
            "hf_fsdp_recipes.tools.preflight.bandwidth",
            str(theirs.fileno()),
            str(listener),
        ]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    [*command, str(local_rank), str(int(on_cpu))],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=kept,
                    pass_fds=[theirs.fileno()] + ([listener] if is_host else []),
                )
            )
        self._lines.append(Lines(ours))

    def read(self, doing: str, deadline: float, is_over: Callable[[], bool]) -> list[dict[str, Any]]:
        """Return the next answer of every process, in the order of local ranks; nothing if it is over elsewhere.

        Raises:
            PreflightError: one failed, died, or was silent until the deadline.
        """
        answers = []
        for index in range(len(self._lines)):
            while not self._lines[index].is_ready(0.2):
                if is_over():
                    return []
                if time.monotonic() > deadline:
                    break
            answers.append(self._read(index, doing, deadline))
        return answers

    def _read(self, index: int, doing: str, deadline: float) -> dict[str, Any]:
        who = f"local rank {self._seat.local_ranks[index]}"
        try:
            answer = self._lines[index].receive(max(deadline, time.monotonic() + 0.1))
        except TimeoutError as error:
            raise PreflightError(f"{who} hung in {doing}{self._last_words(index)}. {_hint(self._seat)}") from error
        except OSError as error:
            self._processes[index].wait(5)
            raise PreflightError(
                f"{who} died in {doing} with status {self._processes[index].returncode}{self._last_words(index)}."
            ) from error
        if "fault" in answer:
            raise PreflightError(f"{who} failed in {doing}: {answer['fault']}. {_hint(self._seat)}")
        return answer

    def measure(self, place: tuple[str, int], timeout_seconds: float) -> None:
        """Tell every process to measure; `read` returns what comes out."""
        seat = self._seat
        first = seat.node * seat.ranks_per_node
        num_nodes = seat.count if seat.kind == "node" else seat.count // seat.ranks_per_node
        for lines, local_rank in zip(self._lines, seat.local_ranks, strict=True):
            lines.send(
                {
                    "rank": first + local_rank,
                    "num_nodes": num_nodes,
                    "ranks_per_node": seat.ranks_per_node,
                    "address": place[0],
                    "port": place[1],
                    "timeout_seconds": timeout_seconds,
                }
            )

    def _last_words(self, index: int) -> str:
        self._logs[index].seek(0)
        words = [
            line.strip() for line in self._logs[index].read().decode(errors="replace").splitlines() if line.strip()
        ]
        return f" (its last words: {words[-1][:200]})" if words else ""


def _hint(seat: Seat) -> str:
    """Name the interface that reaches the master, which is the one that gloo and NCCL should take."""
    name = addresses.find_interface_to(seat.master_address, seat.master_port)
    if name is None:
        return "Remedy: see the log there."
    return (
        f"Remedy: if the wrong network interface was taken, export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}; "
        f"{name} is the one that leads to the master from there."
    )
