"""How the participants of a preflight decide something together, whatever carries their words.

Number 0 gathers what all say, judges, and its judgement is everybody's, in the same words. `StoreMeeting` is for ranks
that torchrun or `accelerate launch` started: their agent has a store on the master port already. Where there is
none, `rollcall` brings them together.
"""

import datetime
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_fsdp_recipes.errors import PreflightError

FAULT_SECONDS = 2.0  # when one has failed, the others are waited for no longer than this
GRACE_SECONDS = 5.0  # the others wait this much longer for a verdict than number 0 gathers for it


@dataclass(frozen=True)
class Seat:
    """Who a participant claims to be, as the launcher told it.

    Attributes:
        kind: "node" (one process a node) or "rank".
        number, count: its number among so many.
        master_address, master_port: where number 0 is to be found.
        node: the number of its node.
        local_ranks: the ranks of its node that it answers for, counted from 0 on each node.
        ranks_per_node: how many there are on a node.
    """

    kind: str
    number: int
    count: int
    master_address: str
    master_port: int
    node: int
    local_ranks: tuple[int, ...]
    ranks_per_node: int


def announcement(seat: Seat) -> dict[str, Any]:
    """Return what a participant says about itself."""
    return {
        "number": seat.number,
        "count": seat.count,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
    }


def named(kind: str, who: dict[str, Any]) -> str:
    """Name a participant: node 1 (hostb, pid 77)."""
    return f"{kind} {who['number']} ({who['host']}, pid {who['pid']})"


class Meeting:
    """Participants that have found each other. Every participant makes the same calls in the same order.

    Attributes:
        names: each participant's name, in order; complete at number 0 only.
    """

    def __init__(self, seat: Seat, timeout_seconds: float) -> None:
        self.seat = seat
        self.names = [f"{seat.kind} {number}" for number in range(seat.count)]
        self.deadline = time.monotonic() + timeout_seconds

    def extend(self, timeout_seconds: float) -> None:
        """Give what follows so many seconds from now."""
        self.deadline = time.monotonic() + timeout_seconds

    def settle(self, stage: str, collect: Callable[[], Any], judge: Callable[[list[Any]], Any]) -> Any:
        """Collect on every participant, judge at number 0, and return its judgement everywhere.

        Collective: every participant must call this. Values and judgement must fit into JSON.

        Args:
            stage: what is being done, for messages: "comparing versions".
            collect: returns this participant's value; its PreflightError is everybody's.
            judge: called at number 0 with all values in order; its PreflightError is everybody's.

        Raises:
            PreflightError: of `collect` or `judge`; a participant left, or was silent until the deadline.
        """
        report = attempt(collect)
        if self.seat.number == 0:
            verdict = attempt(lambda: judge(self._values(self._gather(stage, report))))
            self._publish(stage, verdict)
        else:
            verdict = self._ask(stage, report)
        return agreed(verdict)

    def is_over(self, stage: str) -> bool:
        """Tell, from within `collect`, whether the stage has failed elsewhere, so that waiting is in vain."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave, and free the port."""

    def _values(self, reports: list[dict[str, Any]]) -> list[Any]:
        faults: dict[str, list[str]] = {}
        for name, report in zip(self.names, reports, strict=True):
            if "fault" in report:
                faults.setdefault(report["fault"], []).append(name)
        if faults:
            raise PreflightError("; also: ".join(f"{', '.join(names)}: {fault}" for fault, names in faults.items()))
        return [report["value"] for report in reports]

    def _gather(self, stage: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _publish(self, stage: str, verdict: dict[str, Any]) -> None:
        raise NotImplementedError

    def _ask(self, stage: str, report: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


def attempt(work: Callable[[], Any]) -> dict[str, Any]:
    """Return what work returns, or its fault, ready to be sent."""
    try:
        return {"value": work()}
    except PreflightError as error:
        return {"fault": str(error)}


def agreed(verdict: dict[str, Any]) -> Any:
    """Return a verdict's value, or raise its fault as an error that everybody raises."""
    if "fault" in verdict:
        error = PreflightError(verdict["fault"])
        error.is_agreed = True
        raise error
    return verdict["value"]


class StoreMeeting(Meeting):
    """Ranks that meet at the store of the agent that started them."""

    def __init__(self, seat: Seat, timeout_seconds: float) -> None:
        from torch.distributed import TCPStore

        super().__init__(seat, timeout_seconds)
        self._prefix = f"hf-fsdp-preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = TCPStore(
            seat.master_address, seat.master_port, is_master=False, timeout=datetime.timedelta(seconds=timeout_seconds)
        )

    def call_roll(self) -> None:
        """Learn who is who. Collective: every rank must call this."""

        def judge(everybody: list[dict[str, Any]]) -> None:
            self.names = [named(self.seat.kind, who) for who in everybody]

        self.settle("roll call", lambda: announcement(self.seat), judge)

    def _gather(self, stage: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        if "fault" in report or self.is_over(stage):
            self.deadline = min(self.deadline, time.monotonic() + FAULT_SECONDS)
        found = [report, *(self._find(f"{stage}/{number}", 0.0) for number in range(1, self.seat.count))]
        if any(each is not None and "fault" in each for each in found):
            return [each or {"value": None} for each in found]
        silent = [name for name, each in zip(self.names, found, strict=True) if each is None]
        if silent:
            raise PreflightError(
                f"{', '.join(silent)} did not come or was silent in {stage}. Remedy: look at the log there."
            )
        return [each for each in found if each is not None]

    def is_over(self, stage: str) -> bool:
        """Look for a fault's mark."""
        return self._store.check([f"{self._prefix}/{stage}/fault"])

    def _publish(self, stage: str, verdict: dict[str, Any]) -> None:
        if "fault" in verdict:
            self._store.set(f"{self._prefix}/{stage}/fault", "")
        self._store.set(f"{self._prefix}/{stage}/verdict", json.dumps(verdict))

    def _ask(self, stage: str, report: dict[str, Any]) -> dict[str, Any]:
        self._store.set(f"{self._prefix}/{stage}/{self.seat.number}", json.dumps(report))
        if "fault" in report:
            self._store.set(f"{self._prefix}/{stage}/fault", "")
        verdict = self._find(f"{stage}/verdict", GRACE_SECONDS)
        if verdict is None:
            raise PreflightError(f"{self.names[0]} was silent in {stage}. Remedy: look at the log there.")
        return verdict

    def _find(self, key: str, grace_seconds: float) -> dict[str, Any] | None:
        left_seconds = max(0.05, self.deadline + grace_seconds - time.monotonic())
        try:
            self._store.wait([f"{self._prefix}/{key}"], datetime.timedelta(seconds=left_seconds))
        except RuntimeError:  # torch.distributed's errors: time is up, or the store has gone
            return None
        return json.loads(self._store.get(f"{self._prefix}/{key}"))
