"""What can be wrong between a node and the master's address and port, and how to say it.

Names, addresses, ports and who holds them; sends nothing.
"""

import contextlib
import errno
import ipaddress
import socket

import psutil

TEMPORARY = getattr(socket, "EAI_AGAIN", -3)


def is_loopback(address: str) -> bool:
    """Tell whether an address reaches no other host; a name that does not resolve is no loopback."""
    found = resolve(address)
    return bool(found) and all(ipaddress.ip_address(each.split("%")[0]).is_loopback for each in found)


def is_written_loopback(address: str) -> bool:
    """Tell whether an address means loopback on every host, not only where a name happens to."""
    return address == "localhost" or address.startswith(("127.", "::1"))


def resolve(address: str) -> list[str]:
    """Return the addresses of a name, or an empty list."""
    try:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(address, None)))
    except OSError:
        return []


def own_addresses() -> list[str]:
    """Return this host's addresses, loopback aside."""
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [each for each in found if not ipaddress.ip_address(each.split("%")[0]).is_loopback]


def find_interface_to(address: str, port: int) -> str | None:
    """Return the name of the interface through which an address is reached; sends nothing.

    For an address of this host, the interface that others reach it through.
    """
    return _find_interface(_own_address_towards(address, port) or next(iter(own_addresses()), ""))


def _own_address_towards(address: str, port: int) -> str | None:
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if ipaddress.ip_address(own.split("%")[0]).is_loopback else own


def _find_interface(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def listen(address: str, port: int) -> socket.socket:
    """Listen where number 0 has to.

    On all interfaces, as torch's TCPStore does, except for a loopback address that was written as such: a host's
    own name often means 127.0.1.1 on that host alone.

    Raises:
        OSError: EADDRNOTAVAIL if the address is not this host's, EADDRINUSE if the port is taken.
    """
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind((place[0], 0))
    if is_written_loopback(address):
        return _server(family, str(place[0]), port)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return _server(socket.AF_INET, "", port)


def _server(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=family, backlog=1024)


def find_owner(port: int) -> str | None:
    """Name the process that listens on a port of this host, if the kernel tells."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        is_here = connection.laddr and connection.laddr.port == port
        if is_here and connection.status == psutil.CONN_LISTEN and connection.pid:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline())[:80] or process.name()
                return f"pid {connection.pid} of {process.username()}: {command}"
    return None


def is_hopeless(error: OSError) -> bool:
    """Tell whether trying again cannot help."""
    return isinstance(error, socket.gaierror) and error.errno != TEMPORARY


def explain_refusal(address: str, port: int, error: OSError) -> str:
    """Say why number 0 could not listen at the master address."""
    if isinstance(error, socket.gaierror):
        return explain_silence(address, port, error, 0.0)
    if error.errno == errno.EADDRINUSE:
        return explain_taken(address, port)
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"master address {_full(address)} is not an address of this host "
            f"({', '.join(own_addresses()) or 'loopback only'}). Rule: node 0 listens at the master address. Remedy: give "
            f"that of the host with number 0 (scontrol show hostnames | head -n 1), or start number 0 there."
        )
    return f"nobody can listen at {_full(address)} port {port}: {error.strerror}. Remedy: another --master-port."


def explain_taken(address: str, port: int) -> str:
    """Say that another program holds the master port."""
    owner = find_owner(port) if is_own(address) else None
    return (
        f"port {port} of {_full(address)} is taken by {owner or 'another program'}. Rule: node 0 listens there. Remedy: end "
        f"that program or choose another --master-port."
    )


def is_own(address: str) -> bool:
    """Tell whether an address is one of this host's."""
    return is_loopback(address) or bool(set(resolve(address)) & set(own_addresses()))


def explain_silence(address: str, port: int, error: OSError, waited_seconds: float) -> str:
    """Say why a node could not reach number 0."""
    where, waited = f"{_full(address)} port {port}", f"{waited_seconds:.0f} s"
    if isinstance(error, socket.gaierror):
        return (
            f"master address {address!r} does not resolve ({error.strerror}). Rule: every node resolves it. Remedy: a name "
            f"that `getent hosts` knows on every node, or an IP address."
        )
    if is_loopback(address):
        return (
            f"nobody of this job listens at {where} after {waited}: a loopback address reaches only the host itself. Rule: "
            f"every node reaches node 0 at the master address. Remedy: the name or network address of node 0's host."
        )
    if isinstance(error, ConnectionError):
        return (
            f"nobody listens at {where} after {waited}. Rule: node 0 listens there. Remedy: check that number 0 was started, "
            f"on the host of that address, and see its own message."
        )
    return (
        f"{where} cannot be reached in {waited} ({error.strerror or error}). Rule: every node reaches node 0. Remedy: "
        f"firewall, route, or the address of another network interface of node 0."
    )


def _full(address: str) -> str:
    found = resolve(address)
    return address if not found or address in found else f"{address} ({found[0]})"
