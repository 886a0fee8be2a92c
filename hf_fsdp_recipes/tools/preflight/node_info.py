"""Facts about nodes: versions, code and files, which must be the same on all nodes, and system limits that may be too low."""

import hashlib
import os
import platform
import resource
import shutil
import socket
import time
from pathlib import Path
from typing import TypedDict

import psutil
import torch

from hf_fsdp_recipes.environment import num_cores, package_version
from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import addresses

Row = tuple[str, str]  # one line of the table: a label ("warning" for a warning) and its text

PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft")
MAX_CLOCK_SKEW_SECONDS = 2.0
MIN_SHM_BYTES = 1 << 30  # as in NCCL's documentation: docker run --shm-size=1g
MIN_OPEN_FILES = 1024
# These variables may differ between nodes.
VARIABLES_OF_A_NODE = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_TOPO_FILE", "NCCL_DEBUG_FILE")
DRIVER_VERSION_FILES = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
_INFINIBAND = Path("/sys/class/infiniband")


class NodeInfo(TypedDict):
    """Facts about one node, which it reports to node 0."""

    host: str
    unix_seconds: float
    versions: dict[str, str]
    nccl_variables: dict[str, str]
    code_hash: str
    file_hashes: dict[str, str]
    num_cores: int
    memory_bytes: int
    gloo_error: str | None
    low_limits: list[str]


def collect(files: list[Path], num_ranks: int) -> NodeInfo:
    """Return the facts of this node, including hashes of `files`; raise PreflightError if a file cannot be read."""
    return {
        "host": socket.gethostname(),
        "unix_seconds": time.time(),
        "versions": _find_versions(),
        "nccl_variables": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("NCCL_", "TORCH_NCCL_")) and name not in VARIABLES_OF_A_NODE
        },
        "code_hash": _hash_code(),
        "file_hashes": {str(file): _hash_file(file) for file in files},
        "num_cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gloo_error": _find_gloo_error(),
        "low_limits": find_low_limits(num_ranks),
    }


def _find_versions() -> dict[str, str]:
    """Return the versions of packages and drivers, which must be the same on all nodes.

    All nodes report the same names; the version of a missing package or driver is "none".
    """
    nccl = getattr(torch.get_device_module(), "nccl", None)  # also on ROCm, where RCCL uses NCCL's version numbers
    return {
        "python": platform.python_version(),
        **{name: package_version(name) or "none" for name in PACKAGES},
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "nccl": ".".join(map(str, nccl.version())) if nccl and torch.distributed.is_nccl_available() else "none",
        "driver": next((file.read_text().strip() for file in DRIVER_VERSION_FILES if file.is_file()), "none"),
    }


def find_low_limits(num_ranks: int) -> list[str]:
    """Return which limits of this node may cause trouble in a job of `num_ranks` ranks, and how to raise them."""
    shm_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    max_open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted_files = max(MIN_OPEN_FILES, 8 * num_ranks)
    found = []
    if shm_bytes < MIN_SHM_BYTES:
        found.append(
            f"/dev/shm, which NCCL and data loaders share, is smaller than {MIN_SHM_BYTES >> 30} GiB. Start the container with "
            f"docker run --shm-size=8g or --ipc=host."
        )
    if max_open_files != resource.RLIM_INFINITY and max_open_files < wanted_files:
        found.append(f"the limit on open files is below {wanted_files}. Run ulimit -n 65536.")
    if max_locked_bytes != resource.RLIM_INFINITY and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        found.append("locked memory is limited, but InfiniBand needs it. Run ulimit -l unlimited.")
    return found


def _find_gloo_error() -> str | None:
    """Return why other hosts cannot reach the address at which gloo would listen, or None if they can.

    Source: torch 2.13 `ProcessGroupGloo::createDefaultDevice` uses the address of the host's own name.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    host = socket.gethostname()
    found = addresses.resolve(host)
    if any(not addresses.is_loopback(each) for each in found):
        return None
    return (
        f"its host name {host} {f'resolves to {found[0]}' if found else 'does not resolve'} there, but gloo needs an "
        f"address that other hosts can reach. Export GLOO_SOCKET_IFNAME={addresses.find_interface_to(host)}, or fix /etc/hosts."
    )


def _hash_code() -> str:
    """Return a hash of this package's source code and file names."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _hash_file(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise PreflightError(
            f"{file} cannot be read ({error.strerror}). Every node reads the template and the recipe: put them on shared "
            f"storage, or copy them to every node."
        ) from error


def check_same(nodes: list[NodeInfo], names: list[str]) -> None:
    """Raise a PreflightError that lists every difference between nodes in versions, code, NCCL variables or files."""
    compared = [
        # A node with another version of this package may not report all of these names.
        (name, [node["versions"].get(name, "unknown") for node in nodes], "Install the same versions on every node.")
        for name in nodes[0]["versions"]
    ]
    code = [node["code_hash"] for node in nodes]
    compared.append(("the code of hf_fsdp_recipes", code, "Use the same checkout or wheel on every node."))
    for variable in sorted({name for node in nodes for name in node.get("nccl_variables", ())}):
        values = [node.get("nccl_variables", {}).get(variable, "unset") for node in nodes]
        compared.append((variable, values, "Export the same value on every node."))
    # Compare by position, because the same file can have a different path on each node.
    for index, file in enumerate(nodes[0]["file_hashes"]):
        hashes = [list(node["file_hashes"].values())[index] for node in nodes]
        compared.append((f"the content of {file}", hashes, "Put it on shared storage, or copy it to every node again."))
    errors = [
        f"{what} differs: {differences}. {advice}"
        for what, values, advice in compared
        if (differences := list_differences(values, names))
    ]
    if errors:
        raise PreflightError(" ".join(errors))


def list_differences(values: list[str], names: list[str]) -> str | None:
    """List each value and the nodes that have it, the most common value first; None if all values are equal."""
    holders: dict[str, list[str]] = {}
    for value, name in zip(values, names, strict=True):
        holders.setdefault(value, []).append(name)
    if len(holders) == 1:
        return None
    ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{value} on {shorten(members)}" for value, members in ordered)


def shorten(names: list[str]) -> str:
    """List up to three names, then how many others there are."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def check_host_names(nodes: list[NodeInfo], names: list[str]) -> None:
    """Raise PreflightError if gloo, which CPU ranks and checkpoint coordination use, cannot connect the hosts.

    A single host whose name resolves to loopback is harmless: it can connect to the others. Two such hosts cannot reach
    each other.
    """
    errors = {
        node["host"]: f"{name}: {node['gloo_error']}"
        for node, name in zip(nodes, names, strict=True)
        if node["gloo_error"]
    }
    if len(errors) > 1:
        raise PreflightError(" ".join(errors.values()))


def describe(nodes: list[NodeInfo]) -> list[Row]:
    """Return the preflight table's rows about software and hosts."""
    first = nodes[0]
    clocks = [node["unix_seconds"] for node in nodes]
    files = "".join(f", {Path(file).name} {digest}" for file, digest in first["file_hashes"].items())
    return [
        ("software", ", ".join(f"{name} {text}" for name, text in first["versions"].items() if text != "none")),
        ("content", f"code {first['code_hash']}{files}"),
        (
            "hosts",
            f"at least {min(node['num_cores'] for node in nodes)} cores and "
            f"{min(node['memory_bytes'] for node in nodes) / 1e9:,.1f} GB of memory",
        ),
        ("clocks", f"at most {max(clocks) - min(clocks):.2f} s apart"),
    ]


def find_warnings(nodes: list[NodeInfo], names: list[str]) -> list[str]:
    """Return warnings about what may cause trouble during the run but does not fail the preflight."""
    warnings = []
    clocks = [node["unix_seconds"] for node in nodes]
    skew_seconds = max(clocks) - min(clocks)
    if skew_seconds > MAX_CLOCK_SKEW_SECONDS:
        behind, ahead = names[clocks.index(min(clocks))], names[clocks.index(max(clocks))]
        warnings.append(
            f"clocks differ by {skew_seconds:.1f} s: {ahead} is ahead of {behind}. Synchronize them with chrony or ntp."
        )
    for text in dict.fromkeys(text for node in nodes for text in node["low_limits"]):
        low = [name for node, name in zip(nodes, names, strict=True) if text in node["low_limits"]]
        warnings.append(f"{shorten(low)}: {text}")
    return warnings
