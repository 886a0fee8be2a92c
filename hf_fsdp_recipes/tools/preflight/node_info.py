"""What a node is like, and what may not differ between the nodes of a job: versions, code, files, clock, limits.

Collects and compares; neither talks to other nodes nor imports torch.
"""

import hashlib
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import addresses

PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft")
SKEW_SECONDS = 2.0
MIN_SHM_BYTES = 1 << 30  # what NCCL's documentation gives containers: docker run --shm-size=1g
MIN_OPEN_FILES = 1024
_INFINIBAND = Path("/sys/class/infiniband")


def collect(files: list[Path]) -> dict[str, Any]:
    """Return the facts of this node; `files` are hashed by their content.

    Raises:
        PreflightError: one of `files` cannot be read.
    """
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "unix_seconds": time.time(),
        "versions": {"python": platform.python_version()} | {name: find_version(name) for name in PACKAGES},
        "code": hash_code(),
        "files": {str(file): hash_file(file) for file in files},
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "host": socket.gethostname(),
        "gloo": find_gloo_fault(),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "open_files": soft_files if soft_files != resource.RLIM_INFINITY else -1,
        "is_memlock_limited": locked != resource.RLIM_INFINITY,
        "has_infiniband": _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    }


def find_version(package: str) -> str:
    """Return the version of an installed package, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def find_gloo_fault() -> str | None:
    """Return why gloo would listen where no other host reaches it, or None.

    Source: torch 2.13 `ProcessGroupGloo::createDefaultDevice` takes the address of the host's own name.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    host = socket.gethostname()
    found = addresses.resolve(host)
    if any(not addresses.is_loopback(each) for each in found):
        return None
    interface = addresses.find_interface_to(host, 0) or "eth0"
    return (
        f"its own name {host} {f'means {found[0]}' if found else 'does not resolve'} there. Rule: gloo listens at the "
        f"address of the host's name. Remedy: export GLOO_SOCKET_IFNAME={interface}, or mend /etc/hosts."
    )


def hash_code() -> str:
    """Return a hash of this package's source, names included."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def hash_file(file: Path) -> str:
    """Return a hash of a file's content.

    Raises:
        PreflightError: it cannot be read here.
    """
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise PreflightError(
            f"{file} cannot be read ({error.strerror}). Rule: every node reads the template and the recipe. Remedy: a path "
            f"on shared storage, or copy it to every node."
        ) from error


def check_alike(facts: list[dict[str, Any]], names: list[str]) -> None:
    """Check what may not differ.

    Raises:
        PreflightError: versions, code or files differ; all that do, and who has what.
    """
    faults = []
    for package in facts[0]["versions"]:
        found = differing([each["versions"][package] for each in facts], names)
        if found:
            faults.append(f"{package} differs: {found}. Rule: one version. Remedy: the same environment on every node")
    found = differing([each["code"] for each in facts], names)
    if found:
        faults.append(f"the code of hf_fsdp_recipes differs: {found}. Remedy: the same checkout or wheel on every node")
    for number, file in enumerate(facts[0]["files"]):
        found = differing([list(each["files"].values())[number] for each in facts], names)
        if found:
            faults.append(f"the content of {file} differs: {found}. Remedy: one file, copied anew or on shared storage")
    if faults:
        raise PreflightError("; also: ".join(faults) + ".")


def differing(values: list[str], names: list[str]) -> str | None:
    """Say who has which value, the rarest last, or None if all have one."""
    holders: dict[str, list[str]] = {}
    for value, name in zip(values, names, strict=True):
        holders.setdefault(value, []).append(name)
    if len(holders) == 1:
        return None
    ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{value} on {shorten(who)}" for value, who in ordered)


def shorten(names: list[str]) -> str:
    """List names, the first three of many."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def check_names(facts: list[dict[str, Any]], names: list[str]) -> None:
    """Check that gloo, over which CPU ranks compute and checkpoints are coordinated, will connect the hosts.

    One host whose name means loopback does no harm, it connects to the others; two of them never find each other.

    Raises:
        PreflightError: the names of two hosts or more mean their loopback addresses.
    """
    faults = {each["host"]: f"{name}: {each['gloo']}" for each, name in zip(facts, names, strict=True) if each["gloo"]}
    if len(faults) > 1:
        raise PreflightError("; also: ".join(faults.values()))


def describe(facts: list[dict[str, Any]]) -> list[str]:
    """Return the table's lines about what all have in common."""
    versions = ", ".join(f"{name} {number}" for name, number in facts[0]["versions"].items())
    clocks = [each["unix_seconds"] for each in facts]
    files = "".join(f", {Path(file).name} {digest}" for file, digest in facts[0]["files"].items())
    return [
        f"{'software':<10}{versions}",
        f"{'content':<10}code {facts[0]['code']}{files}",
        f"{'hosts':<10}{min(each['cores'] for each in facts)} cores, "
        f"{min(each['memory_bytes'] for each in facts) / 1e9:,.1f} GB of memory at least",
        f"{'clocks':<10}{max(clocks) - min(clocks):.2f} s apart at most",
    ]


def find_warnings(facts: list[dict[str, Any]], names: list[str], num_ranks: int) -> list[str]:
    """Return what may trouble the run without stopping it."""
    warnings = []
    clocks = [each["unix_seconds"] for each in facts]
    skew = max(clocks) - min(clocks)
    if skew > SKEW_SECONDS:
        first, last = names[clocks.index(min(clocks))], names[clocks.index(max(clocks))]
        warnings.append(
            f"clocks differ by {skew:.1f} s: {last} is ahead of {first}. Rule: {SKEW_SECONDS:.0f} s. Remedy: chrony or ntp."
        )
    wanted_files = max(MIN_OPEN_FILES, 8 * num_ranks)
    rules: list[tuple[Callable[[dict[str, Any]], bool], str]] = [
        (
            lambda each: each["shm_bytes"] < MIN_SHM_BYTES,
            f"/dev/shm is below {MIN_SHM_BYTES >> 30} GiB. Rule: NCCL and data loaders share memory there. Remedy: docker "
            f"run --shm-size=8g, or --ipc=host.",
        ),
        (
            lambda each: 0 <= each["open_files"] < wanted_files,
            f"the limit of open files is below {wanted_files}. Remedy: ulimit -n 65536.",
        ),
        (
            lambda each: each["has_infiniband"] and each["is_memlock_limited"],
            "locked memory is limited, which InfiniBand needs. Remedy: ulimit -l unlimited.",
        ),
    ]
    for is_low, text in rules:
        low = [name for each, name in zip(facts, names, strict=True) if is_low(each)]
        if low:
            warnings.append(f"{shorten(low)}: {text}")
    return warnings
