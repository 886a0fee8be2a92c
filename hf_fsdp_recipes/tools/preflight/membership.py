"""The nodes of a preflight, and the check that each expected one joined exactly once."""

import os
import socket
import subprocess
from dataclasses import dataclass, field

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import addresses


@dataclass(frozen=True)
class ParticipantInfo:
    """One node's process: its options, and where it runs.

    Attributes:
        node_rank: index of the node; node 0 leads.
        master_address, master_port: where node 0, or the launcher's agent there, listens.
    """

    node_rank: int
    num_nodes: int
    ranks_per_node: int
    master_address: str
    master_port: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    slurm_job_id: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", "none"))

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host}, pid {self.pid})"


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
    """Return the hosts of the Slurm job by $SLURM_NODEID; empty outside Slurm."""
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=3, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
