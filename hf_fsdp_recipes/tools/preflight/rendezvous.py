"""Connects the nodes of a preflight through a c10d store, so that all of them get the same result.

Node 0 leads. It hosts a `TCPStore` on the master port. Under torchrun and `accelerate launch`, the nodes use the store
of the launcher's agent instead. Each node writes keys of its own, so a key that is
missing at the deadline shows which node did not respond.
"""

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from hf_fsdp_recipes.errors import PreflightError, summarize
from hf_fsdp_recipes.tools.preflight import addresses

T = TypeVar("T")
R = TypeVar("R")

ANSWER_SECONDS = 5.0  # a preflight answers immediately; without an answer, another program has the port
FAILURE_GRACE_SECONDS = 2.0  # once one node has failed, how long node 0 waits for the reports of the others
VERDICT_GRACE_SECONDS = 5.0  # how much longer the others wait for the result than node 0 waits for their reports
CLOSE_SECONDS = 2.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ParticipantInfo:
    """The preflight process of one node: its options, and where it runs."""

    node_rank: int  # node 0 leads
    num_nodes: int
    ranks_per_node: int
    master_address: str  # where node 0, or the launcher's agent there, listens
    master_port: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    slurm_job_id: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", "none"))

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host}, pid {self.pid})"


class Rendezvous:
    """The nodes of a preflight, which share a store. All nodes must make the same calls in the same order."""

    def __init__(self, info: ParticipantInfo, timeout_seconds: float) -> None:
        """Join the store, or raise PreflightError if the master address cannot be used or another job has the port."""
        self.info = info
        self.timeout_seconds = timeout_seconds
        self.extend_deadline(timeout_seconds)
        # `check_membership` adds each node's host and pid.
        self.names = [f"node {node_rank}" for node_rank in range(info.num_nodes)]
        self.prefix = f"hf-fsdp-preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        tcp_store, self.is_leader = _open_store(info, self.deadline)
        self.store = PrefixStore(self.prefix, tcp_store)
        if self.is_leader:
            self.store.set("leader", json.dumps(asdict(info)))
        self.leader = self._read_leader()

    def _read_leader(self) -> ParticipantInfo:
        info = self.info
        seconds = self.timeout_seconds if _uses_agent_store() else ANSWER_SECONDS
        try:
            self.store.wait(["leader"], timedelta(seconds=seconds))
        except RuntimeError as error:
            if not _uses_agent_store():
                raise _port_conflict(info) from error
            raise PreflightError(f"{info}: node 0 did not join within {seconds:.0f} s; see its log.") from error
        leader = ParticipantInfo(**json.loads(self.store.get("leader")))
        if leader.slurm_job_id != info.slurm_job_id:
            raise PreflightError(
                f"{info}: port {info.master_port} of {info.master_address} is in use by the preflight of Slurm job "
                f"{leader.slurm_job_id} ({leader.host}, pid {leader.pid}); this is job {info.slurm_job_id}. Choose another "
                f"--master-port, for example one derived from the job ID."
            )
        return leader

    def check_membership(self) -> None:
        """Wait for all nodes; raise PreflightError on all of them if one is missing, duplicated or started differently."""
        # Restart the timeout, because this node may have spent part of it waiting for node 0.
        self.extend_deadline(self.timeout_seconds)
        num_joined = self.store.add("num_joined", 1)
        if num_joined > self.leader.num_nodes:
            raise PreflightError(
                f"{self.info} joined after all {self.leader.num_nodes} nodes had. Start one process per node."
            )
        self.store.set(f"joining/{num_joined - 1}", json.dumps(asdict(self.info)))

        def evaluate() -> list[str]:
            members = [ParticipantInfo(**member) for member in self._wait_for_reports("joining") if member is not None]
            return check_members(self.info, members, self.timeout_seconds)

        self.names = self._agree("joining", evaluate)

    def run_stage(self, stage: str, collect: Callable[[], T], evaluate: Callable[[list[T]], R]) -> R:
        """Collect a value on every node, call `evaluate` on node 0 with the values in node order, and return its result everywhere.

        Collective: every node must call this. Values and result must be serializable as JSON. `stage` names the activity in
        messages, such as "comparing versions". All nodes raise the same PreflightError if `collect` or `evaluate`
        failed or a node did not report in time.
        """
        report = attempt(collect)
        with self._naming_leader(stage):
            if "error" in report:
                self.store.set(f"{stage}/failed", "")
            self.store.set(f"{stage}/{self.info.node_rank}", json.dumps(report))
        result: R = self._agree(stage, lambda: evaluate(self._gather(stage)))
        return result

    def has_failed(self, stage: str) -> bool:
        """Return whether the stage has failed on another node, so that `collect` can stop waiting."""
        with self._naming_leader(stage):
            return any(self.store.check([f"{stage}/{key}"]) for key in ("failed", "verdict"))

    def extend_deadline(self, timeout_seconds: float) -> None:
        """Set the deadline of the remaining stages to `timeout_seconds` from now."""
        self.deadline = time.monotonic() + timeout_seconds  # time at which node 0 stops waiting for the other nodes

    def close(self) -> None:
        """Leave the store. Node 0 first gives the others time to read the last result, because its exit can end the store."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(RuntimeError):  # node 0 has exited
            num_left = self.store.add("num_left", 1)
            while self.is_leader and num_left < self.store.add("num_joined", 0) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                num_left = self.store.add("num_left", 0)

    def _agree(self, stage: str, evaluate: Callable[[], Any]) -> Any:
        """Return or raise on every node what `evaluate` returns or raises on node 0."""
        if self.is_leader:
            verdict = attempt(evaluate)
            self.store.set(f"{stage}/verdict", json.dumps(verdict))
        else:
            seconds = max(0.0, self.deadline - time.monotonic()) + VERDICT_GRACE_SECONDS
            with self._naming_leader(stage):
                self.store.wait([f"{stage}/verdict"], timedelta(seconds=seconds))
                verdict = json.loads(self.store.get(f"{stage}/verdict"))
        if "error" in verdict:
            error = PreflightError(verdict["error"])
            error.is_agreed = True
            raise error
        return verdict["value"]

    @contextlib.contextmanager
    def _naming_leader(self, stage: str) -> Iterator[None]:
        try:
            yield
        except DistStoreError as error:
            raise PreflightError(f"{self.leader} did not respond while {stage}; check that process.") from error
        except DistNetworkError as error:
            raise PreflightError(f"{self.leader} exited while {stage}; see its log.") from error

    def _gather(self, stage: str) -> list[Any]:
        reports = self._wait_for_reports(stage)
        failed: dict[str, list[str]] = {}
        for name, report in zip(self.names, reports, strict=True):
            if report is not None and "error" in report:
                failed.setdefault(report["error"], []).append(name)
        if failed:
            raise PreflightError(" ".join(f"{', '.join(names)}: {error}" for error, names in failed.items()))
        silent = [name for name, report in zip(self.names, reports, strict=True) if report is None]
        if silent:
            raise PreflightError(f"{', '.join(silent)} did not respond while {stage}; see the log there.")
        return [report["value"] for report in reports if report is not None]

    def _wait_for_reports(self, stage: str) -> list[dict[str, Any] | None]:
        keys = [f"{stage}/{index}" for index in range(self.info.num_nodes)]
        deadline = self.deadline
        while not self.store.check(keys) and time.monotonic() < deadline:
            if self.store.check([f"{stage}/failed"]):
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]


def attempt(work: Callable[[], Any]) -> dict[str, Any]:
    """Call `work` and return {"value": its result} or {"error": its message}, ready for the store."""
    try:
        return {"value": work()}
    except PreflightError as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        reason = f": {summarize(error, 'line')}" if str(error).strip() else ""
        return {"error": f"{type(error).__name__}{reason}."}


def _uses_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(info: ParticipantInfo, deadline: float) -> tuple[Store, bool]:
    """Host or join the store on the master port; return the store, and whether this process is the leader."""
    address, port = info.master_address, info.master_port
    listen_error: OSError | None = None
    if info.node_rank == 0 and not _uses_agent_store():
        try:
            listener = addresses.listen(address, port).detach()
            return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener), True
        except OSError as error:
            listen_error = error  # another process may lead already; join its store to name it in the error
    started = time.monotonic()
    try:
        addresses.wait_for_listener(address, port, deadline)
    except OSError as error:
        reason = (
            addresses.explain_connect_error(address, port, error, time.monotonic() - started)
            if listen_error is None
            else addresses.explain_listen_error(address, port, listen_error)
        )
        raise PreflightError(f"{info}: {reason}") from error
    return _connect(info), info.node_rank == 0 and listen_error is None


def _connect(info: ParticipantInfo) -> Store:
    stores: list[Store] = []

    def connect() -> None:
        address, timeout = (info.master_address, info.master_port), timedelta(seconds=ANSWER_SECONDS)
        with contextlib.suppress(RuntimeError):
            stores.append(TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False))

    # Connect in a thread, so that this can give up: torch 2.13's TCPStore waits without a timeout for the first answer.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(2 * ANSWER_SECONDS)
    if not stores:
        raise _port_conflict(info)
    return stores[0]


def _port_conflict(info: ParticipantInfo) -> PreflightError:
    return PreflightError(f"{info}: {addresses.explain_port_conflict(info.master_address, info.master_port)}")


def check_members(leader: ParticipantInfo, members: list[ParticipantInfo], waited_seconds: float) -> list[str]:
    """Return the nodes' names in order, or raise PreflightError if one is missing, duplicated or started differently."""
    by_rank: dict[int, list[ParticipantInfo]] = {}
    for member in sorted(members, key=lambda member: (member.node_rank, member.host, member.pid)):
        by_rank.setdefault(member.node_rank, []).append(member)
    errors = [
        f"{member} was started with --num-nodes {member.num_nodes}, node 0 with {leader.num_nodes}; they must match."
        for member in members
        if member.num_nodes != leader.num_nodes
    ]
    for node_rank, claims in by_rank.items():
        if len(claims) > 1:
            processes = " and ".join(f"{claim.host}, pid {claim.pid}" for claim in claims)
            errors.append(
                f"{len(claims)} processes claim to be node {node_rank}: {processes}. Give each node its own --node-rank; under "
                f"Slurm, $SLURM_NODEID must expand on the nodes (srun bash -c '...'), not in the batch script."
            )
        if not 0 <= node_rank < leader.num_nodes:
            errors.append(f"{claims[0]} is out of range: --node-rank must be between 0 and {leader.num_nodes - 1}.")
    missing = [node_rank for node_rank in range(leader.num_nodes) if node_rank not in by_rank]
    if missing and not errors:
        errors.append(_explain_missing(leader, members, missing, waited_seconds))
    if errors:
        raise PreflightError(" ".join(errors))
    return [str(by_rank[node_rank][0]) for node_rank in range(leader.num_nodes)]


def _explain_missing(
    leader: ParticipantInfo, members: list[ParticipantInfo], missing: list[int], waited_seconds: float
) -> str:
    hosts = _list_slurm_hosts()
    absent = ", ".join(f"{each} ({hosts[each]})" if each < len(hosts) else str(each) for each in missing)
    joined = ", ".join(f"{member.node_rank} ({member.host}, pid {member.pid})" for member in members)
    text = f"{len(missing)} of {leader.num_nodes} nodes did not join within {waited_seconds:.0f} s: {absent}; joined: {joined}."
    if addresses.is_written_loopback(leader.master_address):
        return (
            f"{text} Master address {leader.master_address} is loopback, which other hosts cannot reach; pass the name or "
            f"network address of node 0's host."
        )
    return (
        f"{text} The missing nodes must reach {leader.master_address} port {leader.master_port}. Their own logs name a wrong "
        f"address or a firewall; an empty log means they were never started."
    )


def _list_slurm_hosts() -> list[str]:
    """Return the hosts of the Slurm job in the order of $SLURM_NODEID; an empty list outside Slurm."""
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=3, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
