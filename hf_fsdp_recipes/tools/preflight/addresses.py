"""Resolves, listens at and connects to the master address, and explains failures."""

import contextlib
import errno
import ipaddress
import socket
import time

import psutil

_ATTEMPT_SECONDS = 3.0


def resolve(address: str) -> list[str]:
    """Return the IP addresses of a name, or an empty list if it does not resolve."""
    try:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(address, None)))
    except OSError:
        return []


def describe(address: str) -> str:
    """Return `name (first IP address)`; an IP address or an unknown name is returned unchanged."""
    found = resolve(address)
    return address if not found or address in found else f"{address} ({found[0]})"


def is_loopback(address: str) -> bool:
    """Return whether this host resolves an address to loopback only."""
    found = resolve(address)
    return bool(found) and all(map(_is_loopback_ip, found))


def is_written_loopback(address: str) -> bool:
    """Return whether an address is loopback on every host, such as localhost or 127.0.0.1.

    A host's own name does not count: it may resolve to loopback on that host, but not on others.
    """
    return address == "localhost" or address.startswith(("127.", "::1"))


def _is_loopback_ip(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _own_interfaces() -> dict[str, str]:
    """Map each of this host's IP addresses, except loopback, to its network interface."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback_ip(entry.address)
    }


def find_interface_to(address: str) -> str:
    """Return the network interface that leads to an address; the first interface if the address is loopback or unknown."""
    interfaces = _own_interfaces()
    source = ""
    with contextlib.suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # picks a route without sending a packet
            source = str(probe.getsockname()[0])
    return interfaces.get(source) or next(iter(interfaces.values()), "eth0")


def listen(address: str, port: int) -> socket.socket:
    """Listen for the other nodes on all interfaces, as torch's TCPStore does; raise OSError if the address is not this host's."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind((target[0], 0))
    with contextlib.suppress(OSError, ValueError):  # IPv6 may be disabled
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def wait_for_listener(address: str, port: int, deadline: float) -> None:
    """Wait until a TCP connection succeeds; after `deadline`, a value of `time.monotonic()`, raise the last OSError.

    TCPStore's own client would report every failure as a timeout. This function raises immediately if the name does not exist.
    """
    while True:
        attempt_seconds = max(0.1, min(_ATTEMPT_SECONDS, deadline - time.monotonic()))
        try:
            return socket.create_connection((address, port), attempt_seconds).close()
        except OSError as error:
            is_final = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
            if is_final or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def explain_listen_error(address: str, port: int, error: OSError) -> str:
    """Explain why node 0 could not listen at the master address."""
    if isinstance(error, socket.gaierror):
        return explain_connect_error(address, port, error, 0.0)
    if error.errno == errno.EADDRINUSE:
        return explain_port_conflict(address, port)
    if error.errno == errno.EADDRNOTAVAIL:
        own = ", ".join(_own_interfaces()) or "loopback only"
        return (
            f"master address {describe(address)} is not an address of this host ({own}), but node 0 must listen there. Pass "
            f"the address of node 0's host (scontrol show hostnames | head -n 1), or start node 0 on that host."
        )
    return f"cannot listen at {describe(address)} port {port}: {error.strerror}. Choose another --master-port."


def explain_port_conflict(address: str, port: int) -> str:
    """Explain that another program holds the master port."""
    is_here = is_loopback(address) or any(each in _own_interfaces() for each in resolve(address))
    owner = _find_port_owner(port) if is_here else None
    return (
        f"port {port} of {describe(address)} is in use by {owner or 'another program'}, but node 0 must listen there. Stop "
        f"that program or choose another --master-port."
    )


def _find_port_owner(port: int) -> str | None:
    """Describe the process that listens on a port of this host; None if this user may not see that process."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", None) == port
            if is_listening and connection.pid:
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline())[:80] or process.name()
                return f"pid {connection.pid} of {process.username()}: {command}"
    return None


def explain_connect_error(address: str, port: int, error: OSError, waited_seconds: float) -> str:
    """Explain why this node could not reach node 0."""
    target, waited = f"{describe(address)} port {port}", f"after {waited_seconds:.0f} s"
    if isinstance(error, socket.gaierror):
        return (
            f"master address {address!r} does not resolve ({error.strerror}). Pass an IP address, or a name that "
            f"`getent hosts` resolves on every node."
        )
    if is_loopback(address):
        return (
            f"no preflight is listening at {target} {waited}. A loopback address reaches only the host itself; pass the name "
            f"or network address of node 0's host."
        )
    if isinstance(error, ConnectionError):
        return (
            f"nothing is listening at {target} {waited}. Check that node 0 was started on that host, and read its log."
        )
    return (
        f"{target} cannot be reached {waited} ({error.strerror or error}). Check the firewall and the routes, or pass the "
        f"address of another network interface of node 0."
    )
