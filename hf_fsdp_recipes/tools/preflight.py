"""`hf-fsdp preflight`: checks, before training, whether the nodes of a job can work together."""

import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from errno import EADDRINUSE, EADDRNOTAVAIL
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from time import monotonic, sleep
from typing import Annotated, NamedTuple, Optional

from typer import Context, Option

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.settings import read_settings
from hf_fsdp_recipes.tools.files import RecipeOption, TemplateOption, find_file
from hf_fsdp_recipes.tools.launch import find_missing_devices, read_launch

PROBE_BYTES = 64 << 20  # a disk with less free space counts as full
ANSWER_SECONDS = 10.0  # limit for the greeting, which another preflight answers at once
# Enough for NFS, where listing a directory refreshes the client's cache of it.
VISIBLE_SECONDS = 5.0
# Node 0 sends it first, so that another program, or another job's preflight, is told apart.
GREETING = f"preflight {os.getenv('SLURM_JOB_ID')}"
OWN_RANK = (
    "Give each node its own --machine_rank; in an srun command, $SLURM_NODEID needs single quotes "
    "around it."
)


class Node(NamedTuple):
    """The report of one node."""

    machine_rank: int
    host: str
    pid: int
    num_machines: int
    facts: dict  # must be the same on all nodes
    faults: list[str]  # those that the node found on its own

    @property
    def probe_name(self) -> str:
        """Name of the file that the node writes in the output directory."""
        return f".preflight-{self.host}-{self.pid}"

    def __str__(self) -> str:
        return f"node {self.machine_rank} ({self.host}, pid {self.pid})"


Verdict = tuple[list[str], list[str]]  # the hosts of all nodes, and all faults


def preflight(
    context: Context,
    accelerate_config: TemplateOption,
    config: RecipeOption = None,
    output_dir: Annotated[
        Optional[Path], Option("--output_dir", help="Directory of the run.")
    ] = None,
    timeout: Annotated[float, Option(min=1, help="Seconds to wait for the other nodes.")] = 120.0,
) -> None:
    """Can these nodes work together? Run this on each node with `hf-fsdp sft`'s arguments.

    Training arguments are ignored.
    """
    template = find_file("template", accelerate_config)
    launch = read_launch(template, context.args)
    if config and not output_dir:
        output_dir = read_settings(find_file("recipe", config)).get("output_dir")
    facts = {
        "num_machines": launch.num_machines,
        "num_processes": launch.num_processes,
        "python": python_version(),
        **{name: version(name) for name in ("torch", "accelerate", "transformers", "trl", "peft")},
        "template": f"{template.stem} ({sha256(template.read_bytes()).hexdigest():.8})",
    }
    node = Node(
        launch.machine_rank,
        socket.gethostname(),
        os.getpid(),
        launch.num_machines,
        facts,
        faults=list(find_missing_devices(launch)),
    )
    hosts = check_nodes(
        node,
        launch.main_process_ip or "127.0.0.1",
        launch.main_process_port or 29500,
        Path(output_dir) if output_dir else None,
        timeout,
    )
    if node.machine_rank == 0:
        found = _join(f"{name} {value}" for name, value in facts.items())
        print(f"preflight passed on {_join(hosts)}: {found}", flush=True)


def check_nodes(
    node: Node, address: str, port: int, output_dir: Path | None, timeout: float
) -> list[str]:
    """Return the hosts of all nodes, sorted by rank, or raise a ToolError.

    Each node calls this. All that reach node 0 get the same result. Each node connects to `port` of
    node 0, sends its report, and gets node 0's verdict. Node 0 waits up to `timeout` seconds for
    the others. Afterwards, the port is free again.
    """
    try:
        if output_dir:
            try:
                output_dir.mkdir(parents=True, exist_ok=True)
                with (output_dir / node.probe_name).open("wb") as stream:
                    stream.write(os.urandom(PROBE_BYTES))
                    os.fsync(stream.fileno())
                    stream.truncate(0)
            except OSError as error:
                node.faults.append(
                    f"output_dir {output_dir} cannot be written ({error.strerror}). Check "
                    "permissions, quota and mount."
                )
        if node.machine_rank == 0:
            hosts, faults = judge(node, address, port, output_dir, timeout)
        else:
            hosts, faults = ask(node, address, port, timeout)
    except OSError as error:
        raise ToolError(f"{node}: {explain(error, address, port)}") from error
    finally:
        if output_dir:
            with suppress(OSError):
                (output_dir / node.probe_name).unlink()
    if faults:
        raise ToolError(" ".join(faults))
    return hosts


def judge(node: Node, address: str, port: int, output_dir: Path | None, timeout: float) -> Verdict:
    """Collect the reports of all nodes that join in time.

    Send each node the verdict, and return it.
    """
    deadline = monotonic() + timeout
    nodes = [node]
    peers = []
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    # Fails if the address is another host's, or if the port is in use.
    socket.create_server(target[:2], family=family).close()
    with socket.create_server(("", port), family=family, backlog=1024) as server:
        while len(nodes) < node.num_machines and monotonic() < deadline:
            # Errors: nothing has connected in time, or what has connected is no node of this job.
            with suppress(OSError, TypeError, ValueError):
                server.settimeout(deadline - monotonic())
                connection, _ = server.accept()
                connection.settimeout(ANSWER_SECONDS)
                peer = connection.makefile("rw")
                connection.close()  # it stays open until the file is closed
                print(GREETING, file=peer, flush=True)
                nodes.append(Node(*json.loads(peer.readline())))
                peers.append(peer)
    nodes.sort(key=lambda each: each[:3])
    faults = list(find_faults(nodes, address, timeout))
    if output_dir and not faults:
        faults = find_unseen(nodes, output_dir)
    verdict = ([each.host for each in nodes], faults)
    for peer in peers:
        with suppress(OSError):
            print(json.dumps(verdict), file=peer, flush=True)
    return verdict


def ask(node: Node, address: str, port: int, timeout: float) -> Verdict:
    """Send this node's report to node 0, as soon as that listens. Return node 0's verdict.

    Plain sockets are used, because a TCPStore has no timeout when it connects to a port of another
    program.
    """
    deadline = monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((address, port), ANSWER_SECONDS)
            break
        except OSError:
            if monotonic() > deadline:
                raise
            sleep(0.2)
    peer = connection.makefile("rw")
    greeting = None
    with suppress(OSError, ValueError):
        greeting = peer.readline().strip()
    if greeting != GREETING:
        raise OSError(EADDRINUSE, "another program answers")
    connection.settimeout(timeout + 2 * ANSWER_SECONDS)
    try:
        print(json.dumps(node), file=peer, flush=True)
        return json.loads(peer.readline())
    except (OSError, ValueError) as error:
        raise ToolError(f"{node}: node 0 has stopped. Its own output says why.") from error


def find_faults(nodes: list[Node], address: str, timeout: float) -> Iterator[str]:
    """Generate the faults found in the nodes' reports. `nodes` must be sorted by machine rank."""
    for node in nodes:
        for fault in node.faults:
            yield f"{node}: {fault}"
    for name in nodes[0].facts:
        if len({node.facts[name] for node in nodes}) > 1:
            found = "; ".join(f"{node.facts[name]} on {node}" for node in nodes)
            yield f"{name} differs: {found}. Make it the same on all nodes."
    ranks = [node.machine_rank for node in nodes]
    rivals = [node for node in nodes if ranks.count(node.machine_rank) > 1]
    missing = sorted(set(range(nodes[0].num_machines)).difference(ranks))
    if rivals:
        yield f"a machine_rank is used more than once: {_join(rivals)}. {OWN_RANK}"
    elif missing:
        yield (
            f"machine_rank {_join(missing)} did not join within {timeout:.0f} s; joined: "
            f"{_join(nodes)}. {advise(address)}"
        )


def _join(items: Iterable) -> str:
    return ", ".join(map(str, items))


def explain(error: OSError, address: str, port: int) -> str:
    """Explain why node 0 cannot listen, or why another node cannot reach it."""
    if isinstance(error, socket.gaierror):
        return (
            f"main_process_ip {address!r} does not resolve. Pass an IP address, or a name that all "
            "nodes resolve."
        )
    if error.errno == EADDRINUSE:
        return (
            f"main_process_port {port} of {address} is in use (see `ss -ltnp`). Pass another one. "
            f"{OWN_RANK}"
        )
    if error.errno == EADDRNOTAVAIL:
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
    if address.startswith(("localhost", "127.", "::1")):
        return "A loopback address leads each host to itself: pass the address of node 0's host."
    return "Check that all nodes were started, their own output, the address, firewalls and routes."


def find_unseen(nodes: list[Node], output_dir: Path) -> list[str]:
    """Return a fault if node 0, which calls this, does not see the files of all nodes."""
    deadline = monotonic() + VISIBLE_SECONDS
    while True:
        files = set(output_dir.iterdir())
        unseen = [node for node in nodes if output_dir / node.probe_name not in files]
        if not unseen:
            return []
        if monotonic() > deadline:
            return [
                f"{nodes[0]} does not see the files of {_join(unseen)}. All nodes save in "
                f"{output_dir}: pass an absolute path on storage that all of them mount."
            ]
        sleep(0.1)
