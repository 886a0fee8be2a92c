"""Judges who came to the roll call: everybody, once, and under the number and count that they should have.

Knows no connections; gets what the participants announced.
"""

import os
import subprocess
from typing import Any

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import addresses
from hf_fsdp_recipes.tools.preflight.rendezvous import Seat, named


def check(seat: Seat, everybody: list[dict[str, Any]], waited_seconds: float) -> None:
    """Check that every participant is there exactly once.

    Raises:
        PreflightError: other counts, double, out of range or missing numbers; says who came and who did not.
    """
    kind, faults = seat.kind, []
    for who in everybody:
        if who["count"] != seat.count:
            faults.append(
                f"{named(kind, who)} was told of {who['count']} {kind}s and {kind} 0 of {seat.count}. Rule: all are told "
                f"the same. Remedy: one --num-nodes for all."
            )
    by_number: dict[int, list[str]] = {}
    for who in sorted(everybody, key=lambda who: (who["number"], who["host"], who["pid"])):
        by_number.setdefault(who["number"], []).append(f"{who['host']}, pid {who['pid']}")
    for number, places in by_number.items():
        if len(places) > 1:
            faults.append(
                f"{len(places)} processes claim to be {kind} {number}: {' and '.join(places)}. Rule: every {kind} has a number "
                f"of its own. Remedy: $SLURM_NODEID has to be expanded on the nodes (srun bash -c '...'), not by sbatch."
            )
        if not 0 <= number < seat.count:
            faults.append(f"{kind} {number} ({places[0]}) is out of range. Rule: 0 to {seat.count - 1}.")
    missing = [number for number in range(seat.count) if number not in by_number]
    if missing and not faults:
        faults.append(_explain_missing(seat, by_number, missing, waited_seconds))
    if faults:
        raise PreflightError("; also: ".join(faults))


def _explain_missing(seat: Seat, by_number: dict[int, list[str]], missing: list[int], waited_seconds: float) -> str:
    kind = seat.kind
    came = ", ".join(f"{number} ({places[0]})" for number, places in by_number.items())
    absent = _find_absent_hosts({place.split(",")[0] for places in by_number.values() for place in places})
    text = (
        f"{len(missing)} of {seat.count} {kind}s did not come within {waited_seconds:.0f} s: {', '.join(map(str, missing))}"
        f"{f' (not heard of: {absent})' if absent else ''}; came: {came}."
    )
    if addresses.is_written_loopback(seat.master_address):
        return (
            f"{text} Rule: every {kind} reaches {kind} 0, and master address {seat.master_address} is loopback, which other "
            f"hosts cannot reach. Remedy: the name or network address of {kind} 0's host."
        )
    return (
        f"{text} Rule: all come to {seat.master_address} port {seat.master_port}. Remedy: see the log there; they say why if "
        f"they run (wrong address, firewall), and nothing if they were never started."
    )


def _find_absent_hosts(heard: set[str]) -> str:
    """Name the hosts of a Slurm job that are not among those heard; nothing outside Slurm."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return ""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=3, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    short = {host.split(".")[0] for host in heard}
    return ", ".join(host for host in shown.stdout.split() if host.split(".")[0] not in short)
