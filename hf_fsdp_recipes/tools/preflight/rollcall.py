"""Calls the roll before any process group: number 0 listens on the master port, the others come to it.

Each says who it claims to be, so that who is missing, double or a stranger is known by name where a rendezvous would
only wait. One line of JSON a message over plain TCP; imports no torch.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import addresses, membership
from hf_fsdp_recipes.tools.preflight.jsonl_socket import Lines
from hf_fsdp_recipes.tools.preflight.rendezvous import (
    FAULT_SECONDS,
    GRACE_SECONDS,
    Meeting,
    Seat,
    agreed,
    announcement,
    attempt,
    named,
)

GREETING = "hf-fsdp preflight 1"
LOOPBACK_SECONDS = 10.0  # who is on this host comes at once, who is on another never does
GREETING_SECONDS = 3.0
FAREWELL_SECONDS = 2.0


def meet(seat: Seat, timeout_seconds: float) -> Meeting:
    """Call the roll: return when every participant is there once.

    Collective: every participant must call this.

    Raises:
        PreflightError: the master address or port is not usable; participants are missing, double, out of range or
            of another job. Within `timeout_seconds` of this participant's start, and the grace if it was heard.
    """
    is_written = addresses.is_written_loopback(seat.master_address)  # its own name may mean loopback on a host alone
    if seat.count > 1 and (is_written or (seat.number > 0 and addresses.is_loopback(seat.master_address))):
        timeout_seconds = min(timeout_seconds, LOOPBACK_SECONDS)
    deadline = time.monotonic() + timeout_seconds
    refusal = None
    if seat.number == 0:
        try:
            listener = addresses.listen(seat.master_address, seat.master_port)
        except OSError as error:
            refusal = error  # somebody else may be number 0 too, and be there already
        else:
            chair = Chair(seat, listener, timeout_seconds)
            chair.call_roll()
            return chair
    lines, greeting = _reach(seat, deadline, refusal)
    member = Member(seat, lines, greeting, timeout_seconds)
    member.announce()
    return member


def _reach(seat: Seat, deadline: float, refusal: OSError | None) -> tuple[Lines, dict[str, Any]]:
    """Connect to number 0; `refusal` is why this participant could not be it."""
    started = time.monotonic()
    try:
        return _connect(seat, deadline)
    except PreflightError as error:
        text = str(error)
    except OSError as error:
        if refusal is None:
            waited_seconds = time.monotonic() - started
            text = addresses.explain_silence(seat.master_address, seat.master_port, error, waited_seconds)
        else:
            text = addresses.explain_refusal(seat.master_address, seat.master_port, refusal)
    raise PreflightError(f"{named(seat.kind, announcement(seat))}: {text}")


def _connect(seat: Seat, deadline: float) -> tuple[Lines, dict[str, Any]]:
    place = (seat.master_address, seat.master_port)
    while True:
        try:
            lines = Lines(socket.create_connection(place, max(0.1, min(3.0, deadline - time.monotonic()))))
            return lines, _check_greeting(seat, lines)
        except OSError as error:
            if time.monotonic() > deadline or addresses.is_hopeless(error):
                raise
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))


def _check_greeting(seat: Seat, lines: Lines) -> dict[str, Any]:
    """Read the first line that number 0 says; ConnectionError if it closed at once (it may be on its way out)."""
    taken = addresses.explain_taken(seat.master_address, seat.master_port)
    try:
        greeting = lines.receive(time.monotonic() + GREETING_SECONDS)
    except (ValueError, TimeoutError) as error:
        raise PreflightError(taken) from error
    if not isinstance(greeting, dict) or greeting.get("greeting") != GREETING:
        raise PreflightError(taken)
    job = announcement(seat)["job"]
    if greeting["job"] != job:
        raise PreflightError(
            f"port {seat.master_port} of {seat.master_address} is taken by the preflight of job {greeting['job'] or 'none'} "
            f"({greeting['host']}, pid {greeting['pid']}), and this is job {job or 'none'}. Rule: one job a port. Remedy: "
            f"another --master-port; derive it from the job's id."
        )
    return greeting


class Member(Meeting):
    """A participant that has come to number 0."""

    def __init__(self, seat: Seat, lines: Lines, greeting: dict[str, Any], timeout_seconds: float) -> None:
        super().__init__(seat, timeout_seconds)
        self._lines = lines
        self._chair = f"{seat.kind} 0 ({greeting['host']}, pid {greeting['pid']})"

    def announce(self) -> None:
        """Say who this is and wait for the roll."""
        try:
            agreed(self._ask("roll call", announcement(self.seat)))
        except PreflightError:
            self.close()
            raise

    def _ask(self, stage: str, report: dict[str, Any]) -> dict[str, Any]:
        try:
            with contextlib.suppress(ConnectionError):  # it may have judged already, and said so before it left
                self._lines.send(report)
            return self._lines.receive(max(self.deadline, time.monotonic()) + GRACE_SECONDS)
        except TimeoutError as error:
            raise PreflightError(
                f"{self._chair} was silent after {stage}. Remedy: look at that node: is the process stopped?"
            ) from error
        except OSError as error:
            raise PreflightError(f"{self._chair} left during {stage}. Remedy: its own message says why.") from error

    def is_over(self, stage: str) -> bool:
        """Look for a verdict that came before this participant has spoken."""
        return self._lines.is_ready(0.0)

    def close(self) -> None:
        """Leave."""
        self._lines.stream.close()


@dataclass(eq=False)
class _Guest:
    """One connection, as number 0 sees it."""

    lines: Lines
    who: dict[str, Any] | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    has_left: bool = False


class Chair(Meeting):
    """Number 0: listens, gathers, judges."""

    def __init__(self, seat: Seat, listener: socket.socket, timeout_seconds: float) -> None:
        super().__init__(seat, timeout_seconds)
        self._listener = listener
        self._timeout_seconds = timeout_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._guests: list[_Guest] = []
        self._seated: list[_Guest] = []
        self._is_called = False

    def call_roll(self) -> None:
        """Wait for everybody, tell everybody how it went."""
        self._serve_until(lambda: len(self._announced()) >= self.seat.count - 1)
        verdict = attempt(self._check_roll)
        self._is_called = True
        self._send_to(self._announced(), verdict)
        try:
            agreed(verdict)
        except PreflightError:
            self.close()
            raise

    def close(self) -> None:
        """Let the others leave first, so that no connection lingers on the port, then free it."""
        until = time.monotonic() + FAREWELL_SECONDS
        while time.monotonic() < until and not all(guest.has_left for guest in self._announced()):
            self._serve_once(0.1)
        for guest in self._guests:
            guest.lines.stream.close()
        self._selector.close()
        self._listener.close()

    def _announced(self) -> list[_Guest]:
        return [guest for guest in self._guests if guest.who is not None]

    def _check_roll(self) -> None:
        own = announcement(self.seat)
        everybody = [own, *(guest.who for guest in self._announced() if guest.who is not None)]
        membership.check(self.seat, everybody, self._timeout_seconds)
        by_number = {guest.who["number"]: guest for guest in self._announced() if guest.who is not None}
        self._seated = [by_number[number] for number in range(1, self.seat.count)]
        everybody.sort(key=lambda who: who["number"])
        self.names = [named(self.seat.kind, who) for who in everybody]

    def is_over(self, stage: str) -> bool:
        """Look for faults that have come in, and for those who have left."""
        self._serve_once(0.0)
        return any(guest.has_left or any("fault" in report for report in guest.reports) for guest in self._seated)

    def _gather(self, stage: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        def is_complete() -> bool:
            return all(guest.reports or guest.has_left for guest in self._seated)

        self._serve_until(lambda: is_complete() or "fault" in report or self.is_over(stage))
        if not is_complete():
            self.deadline = min(self.deadline, time.monotonic() + FAULT_SECONDS)
            self._serve_until(is_complete)
        reports = [report, *(guest.reports.pop(0) if guest.reports else None for guest in self._seated)]
        if not any(each is not None and "fault" in each for each in reports):
            self._check_all_spoke(stage, reports)
        return [each or {"value": None} for each in reports]

    def _check_all_spoke(self, stage: str, reports: list[dict[str, Any] | None]) -> None:
        silent = [
            (name, guest.has_left)
            for name, guest, report in zip(self.names[1:], self._seated, reports[1:], strict=True)
            if report is None
        ]
        if silent:
            gone = [f"{name} left during {stage}" for name, has_left in silent if has_left]
            mute = [f"{name} was silent in {stage}" for name, _ in silent]
            raise PreflightError("; ".join(gone or mute) + ". Remedy: look at the log and the processes there.")

    def _publish(self, stage: str, verdict: dict[str, Any]) -> None:
        self._send_to(self._seated, verdict)

    def _send_to(self, guests: list[_Guest], verdict: dict[str, Any]) -> None:
        for guest in guests:
            try:
                guest.lines.send(verdict)
            except OSError:
                guest.has_left = True

    def _serve_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done() and time.monotonic() < self.deadline:
            self._serve_once(min(0.2, max(0.0, self.deadline - time.monotonic())))

    def _serve_once(self, wait_seconds: float) -> None:
        for key, _ in self._selector.select(wait_seconds):
            if key.data is None:
                self._greet()
            else:
                self._listen_to(key.data)

    def _greet(self) -> None:
        try:
            guest = _Guest(Lines(self._listener.accept()[0]))
            guest.lines.send({"greeting": GREETING} | announcement(self.seat))
        except OSError:
            return  # it left again
        self._guests.append(guest)
        self._selector.register(guest.lines.stream, selectors.EVENT_READ, guest)

    def _listen_to(self, guest: _Guest) -> None:
        try:
            values = guest.lines.receive_ready()
        except (OSError, ValueError):  # gone, or no participant at all
            guest.has_left = True
            self._selector.unregister(guest.lines.stream)
            return
        for value in values:
            if guest.who is not None:
                guest.reports.append(value)
            else:
                guest.who = value
                if self._is_called:
                    fault = (
                        f"{named(self.seat.kind, value)} came when all {self.seat.count} were there. Rule: one process "
                        f"a {self.seat.kind}. Remedy: start no more than that."
                    )
                    self._send_to([guest], {"fault": fault})
