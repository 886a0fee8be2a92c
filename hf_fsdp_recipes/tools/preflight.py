"""`hf-fsdp preflight`: checks, before training, whether the nodes of a job can work together."""

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import BufferedRWPair
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Optional

from typer import Context, Option

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools.files import Settings, find_file, read_yaml

PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft")
PROBE_BYTES = 64 << 20  # a disk with less free space counts as full
ANSWER_SECONDS = 10.0  # limit for the greeting, which another preflight answers at once
# Enough for NFS, where listing a directory refreshes the client's cache of it.
VISIBLE_SECONDS = 5.0
MAX_SHOWN = 4  # longer lists of nodes are shortened
DEFAULTS: Settings = {
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_ip": "127.0.0.1",
    "main_process_port": 29500,
}
OWN_RANK = (
    "Give each node its own --machine_rank; in an srun command, $SLURM_NODEID needs single quotes "
    "around it."
)


class PortTakenError(OSError):
    """Another program, or the preflight of another job, answers at the job's port."""


@dataclass(frozen=True)
class Node:
    """The report of one node.

    `facts` must be the same on all nodes. `faults` are those that the node found on its own.
    """

    machine_rank: int
    num_machines: int
    facts: dict[str, str]
    faults: list[str] = field(default_factory=list)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @property
    def probe_name(self) -> str:
        """Name of the file that the node writes in the output directory."""
        return f".preflight-{self.host}-{self.pid}"

    def __str__(self) -> str:
        return f"node {self.machine_rank} ({self.host}, pid {self.pid})"


Verdict = tuple[list[Node], list[str]]  # all nodes, and all faults


def preflight(
    context: Context,
    accelerate_config: Annotated[
        Optional[str], Option("--accelerate_config", help="The template.")
    ] = None,
    num_machines: Annotated[
        Optional[int], Option("--num_machines", min=1, help="Nodes of the job.")
    ] = None,
    machine_rank: Annotated[
        Optional[int], Option("--machine_rank", help="This node's number, from 0.")
    ] = None,
    main_process_ip: Annotated[
        Optional[str], Option("--main_process_ip", help="Address of node 0.")
    ] = None,
    main_process_port: Annotated[
        Optional[int], Option("--main_process_port", help="The job's port.")
    ] = None,
    num_processes: Annotated[
        Optional[int], Option("--num_processes", min=1, help="Ranks on all nodes.")
    ] = None,
    config: Annotated[
        Optional[str], Option("--config", help="Recipe that sets output_dir.")
    ] = None,
    output_dir: Annotated[
        Optional[Path], Option("--output_dir", help="Directory of the run.")
    ] = None,
    timeout: Annotated[float, Option(min=1, help="Seconds to wait for the other nodes.")] = 120.0,
) -> None:
    """Can these nodes work together? Run this on each node with `hf-fsdp sft`'s arguments.

    Training arguments are ignored.
    """
    job = dict(DEFAULTS)
    template = None
    if accelerate_config:
        template = find_file("template", accelerate_config)
        job |= read_yaml(template)
    job |= {name: value for name, value in context.params.items() if value is not None}
    job.setdefault("num_processes", job["num_machines"])
    if output_dir is None and config is not None:
        output_dir = read_yaml(find_file("recipe", config)).get("output_dir")
    directory = Path(output_dir) if output_dir else None
    facts = find_facts(job, template)
    node = Node(job["machine_rank"], job["num_machines"], facts)
    nodes = check_nodes(node, job["main_process_ip"], job["main_process_port"], directory, timeout)
    if node.machine_rank == 0:
        hosts = ", ".join(checked.host for checked in nodes)
        found = ", ".join(f"{name} {value}" for name, value in facts.items())
        print(f"preflight passed on {hosts}: {found}", flush=True)


def find_facts(job: Settings, template: Path | None) -> dict[str, str]:
    """Return what must be the same on all nodes: sizes of the job, versions, and the template."""
    facts = {name: str(job[name]) for name in ("num_machines", "num_processes")}
    facts["python"] = platform.python_version()
    facts |= {name: importlib.metadata.version(name) for name in PACKAGES}
    if template is not None:
        digest = hashlib.sha256(template.read_bytes()).hexdigest()[:8]
        facts["template"] = f"{template.stem} ({digest})"
    return facts


def check_nodes(
    node: Node, address: str, port: int, output_dir: Path | None, timeout: float
) -> list[Node]:
    """Return all nodes, sorted by rank, or raise a ToolError.

    Each node calls this. All that reach node 0 get the same result. Each node connects to `port` of
    node 0, sends its report, and gets node 0's verdict. Node 0 waits up to `timeout` seconds for
    the others. Afterwards, the port is free again.
    """
    probe = output_dir / node.probe_name if output_dir else None
    try:
        if probe:
            node.faults.extend(write_probe(probe))
        if node.machine_rank == 0:
            nodes, faults = judge(node, address, port, output_dir, timeout)
        else:
            nodes, faults = ask(node, address, port, timeout)
    except OSError as error:
        raise ToolError(f"{node}: {explain(error, address, port)}") from error
    finally:
        if probe:
            with suppress(OSError):
                probe.unlink()
    if faults:
        raise ToolError(" ".join(faults))
    return nodes


def judge(node: Node, address: str, port: int, output_dir: Path | None, timeout: float) -> Verdict:
    """Collect the reports of all nodes that join in time.

    Send all nodes and all faults to each node, and return them.
    """
    deadline = monotonic() + timeout
    nodes = [node]
    peers = []
    with listen(address, port) as server:
        while len(nodes) < node.num_machines:
            seconds_left = deadline - monotonic()
            if seconds_left <= 0:
                break
            server.settimeout(seconds_left)
            # Errors: nothing has connected, or what has connected is no node of this job.
            with suppress(OSError, TypeError, ValueError):
                connection, _ = server.accept()
                peer = greet(connection, ANSWER_SECONDS)
                nodes.append(Node(**json.loads(peer.readline())))
                peers.append(peer)
    nodes.sort(key=lambda each: (each.machine_rank, each.host, each.pid))
    faults = find_faults(nodes, address, timeout)
    if output_dir and not faults:
        faults = find_unseen(nodes, output_dir)
    for peer in peers:
        with suppress(OSError):
            send(peer, [nodes, faults])
    return nodes, faults


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a port of this host, at all of its addresses.

    Raises an OSError if the address is another host's, or if the port is in use.
    """
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    socket.create_server(target[:2], family=family).close()
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=is_dual)


def ask(node: Node, address: str, port: int, timeout: float) -> Verdict:
    """Send this node's report to node 0, as soon as that listens. Return all nodes and all faults.

    Plain sockets are used, because a TCPStore has no timeout when it connects to a port of another
    program.
    """
    deadline = monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=ANSWER_SECONDS / 2)
            peer = greet(connection, timeout + 2 * ANSWER_SECONDS)
            break
        except (socket.gaierror, PortTakenError):
            raise
        except OSError:
            if monotonic() > deadline:
                raise
            sleep(0.2)
    try:
        send(peer, node)
        nodes, faults = json.loads(peer.readline())
    except (OSError, ValueError) as error:
        raise ToolError(f"{node}: node 0 has stopped. Its own output says why.") from error
    return [Node(**values) for values in nodes], faults


def greet(connection: socket.socket, timeout: float) -> BufferedRWPair:
    """Return the connection as a file with this timeout.

    Raises a PortTakenError unless this job's preflight answers.
    """
    connection.settimeout(ANSWER_SECONDS)
    peer = connection.makefile("rwb")
    greeting = f"preflight {os.environ.get('SLURM_JOB_ID')}"
    answer = None
    with suppress(OSError, ValueError):
        send(peer, greeting)
        answer = json.loads(peer.readline())
    connection.close()  # it stays open until the file is closed
    if answer != greeting:
        raise PortTakenError("another program answers")
    connection.settimeout(timeout)
    return peer


def send(peer: BufferedRWPair, message: object) -> None:
    """Send a message, which may hold nodes, as a line of JSON."""
    peer.write(json.dumps(message, default=asdict).encode() + b"\n")
    peer.flush()


def find_faults(nodes: list[Node], address: str, timeout: float) -> list[str]:
    """Return the faults found in the nodes' reports. `nodes` must be sorted by machine rank."""
    faults = [f"{node}: {fault}" for node in nodes for fault in node.faults]
    for name in nodes[0].facts:
        holders = defaultdict(list)
        for node in nodes:
            holders[node.facts.get(name, "none")].append(node)
        if len(holders) > 1:
            found = "; ".join(f"{value} on {_shorten(group)}" for value, group in holders.items())
            faults.append(f"{name} differs: {found}. Make it the same on all nodes.")
    ranks = [node.machine_rank for node in nodes]
    repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    for rank in repeated:
        claims = _shorten([node for node in nodes if node.machine_rank == rank])
        faults.append(f"machine_rank {rank} is used more than once: {claims}. {OWN_RANK}")
    missing = sorted(set(range(nodes[0].num_machines)).difference(ranks))
    if missing and not repeated:
        faults.append(
            f"machine_rank {_shorten(missing)} did not join within {timeout:.0f} s; joined: "
            f"{_shorten(nodes)}. {advise(address)}"
        )
    return faults


def _shorten(items: Sequence[object]) -> str:
    text = ", ".join(map(str, items[:MAX_SHOWN]))
    if len(items) > MAX_SHOWN:
        text += f" and {len(items) - MAX_SHOWN} more"
    return text


def explain(error: OSError, address: str, port: int) -> str:
    """Explain why node 0 cannot listen, or why another node cannot reach it."""
    if isinstance(error, socket.gaierror):
        return (
            f"main_process_ip {address!r} does not resolve. Pass an IP address, or a name that all "
            "nodes resolve."
        )
    if isinstance(error, PortTakenError) or error.errno == errno.EADDRINUSE:
        return (
            f"main_process_port {port} of {address} is in use (see `ss -ltnp`). Pass another one. "
            f"{OWN_RANK}"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"main_process_ip {address} is not an address of this host. Pass that of node 0's "
            f"host. {OWN_RANK}"
        )
    return (
        f"node 0 cannot be reached at {address} port {port} ({error.strerror or error}). "
        f"{advise(address)}"
    )


def advise(address: str) -> str:
    """Return advice for nodes that cannot connect at this address."""
    if address == "localhost" or address.startswith(("127.", "::1")):
        return "A loopback address leads each host to itself: pass the address of node 0's host."
    return "Check that all nodes were started, their own output, the address, firewalls and routes."


def write_probe(probe: Path) -> Iterator[str]:
    """Create the output directory and write a file in it. Yield a fault if there is one."""
    directory = probe.parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as stream:
            stream.write(os.urandom(PROBE_BYTES))
            os.fsync(stream.fileno())
            stream.truncate(0)
    except OSError as error:
        yield (
            f"output_dir {directory} cannot be written ({error.strerror}). Check permissions, "
            "quota and mount."
        )


def find_unseen(nodes: list[Node], output_dir: Path) -> list[str]:
    """Return a fault if node 0, which calls this, does not see the files of all nodes."""
    deadline = monotonic() + VISIBLE_SECONDS
    while True:
        names = {file.name for file in output_dir.iterdir()}
        unseen = [node for node in nodes if node.probe_name not in names]
        if not unseen:
            return []
        if monotonic() > deadline:
            return [
                f"{nodes[0]} does not see the files of {_shorten(unseen)}. All nodes save in "
                f"{output_dir}: pass an absolute path on storage that all of them mount."
            ]
        sleep(0.1)
