"""What may not differ between the devices of a job's ranks, and when one is too busy to be used.

Judges what the measuring processes report; looks at no device itself.
"""

from typing import Any

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight.node_info import differing

MIN_FREE_SHARE = 0.5  # below it somebody else computes there
FREE_SHARE_TO_WARN = 0.9
MEMORY_TOLERANCE = 0.02  # drivers and ECC settings differ a little


def check(found: list[list[dict[str, Any]]], names: list[str], ranks_per_node: int) -> None:
    """Check that every rank has a device like the others' and to itself; `found` holds one dict a local rank.

    Raises:
        PreflightError: kinds, counts or memory differ, too few devices, or a device is busy.
    """
    faults = []
    first = [devices[0] for devices in found]
    for what, key in (("kind", "kind"), ("number", "count")):
        odd = differing([str(device[key]) for device in first], names)
        if odd:
            faults.append(
                f"the {what} of devices differs: {odd}. Rule: nodes are alike. Remedy: look there with nvidia-smi"
            )
    for name, devices in zip(names, found, strict=True):
        device = devices[0]
        if device["kind"] != "cpu" and device["count"] < ranks_per_node:
            faults.append(
                f"{name} has {device['count']} {device['kind']} devices for {ranks_per_node} ranks. Rule: one a rank. Remedy: "
                f"fewer ranks a node, or ask for more devices (--gpus-per-node, CUDA_VISIBLE_DEVICES)"
            )
    faults += _memory_faults(found, names) if not faults else []
    if faults:
        raise PreflightError("; also: ".join(faults) + ".")


def _memory_faults(found: list[list[dict[str, Any]]], names: list[str]) -> list[str]:
    everything = [
        (name, index, device)
        for name, devices in zip(names, found, strict=True)
        for index, device in enumerate(devices)
    ]
    faults = []
    smallest = min(everything, key=lambda each: each[2]["total_bytes"])
    largest = max(everything, key=lambda each: each[2]["total_bytes"])
    if smallest[2]["total_bytes"] < largest[2]["total_bytes"] * (1 - MEMORY_TOLERANCE):
        faults.append(
            f"device memory differs: {_sized(*smallest)}; {_sized(*largest)}. Rule: the smallest rules all ranks. Remedy: "
            f"nodes of one kind"
        )
    for name, index, device in everything:
        if device["free_bytes"] < device["total_bytes"] * MIN_FREE_SHARE:
            faults.append(
                f"device {index} of {name} is busy: {device['free_bytes'] / 1e9:.1f} of {device['total_bytes'] / 1e9:.1f} "
                f"GB free. Rule: half at least. Remedy: end what runs there (nvidia-smi names it)"
            )
    return faults


def _sized(name: str, index: int, device: dict[str, Any]) -> str:
    return f"device {index} of {name} ({device['name']}) has {device['total_bytes'] / 1e9:.1f} GB"


def describe(found: list[list[dict[str, Any]]], names: list[str]) -> list[str]:
    """Return the table's line and warnings."""
    device = found[0][0]
    if device["kind"] == "cpu":
        return [f"{'devices':<10}CPU ranks"]
    flat = [each for devices in found for each in devices]
    kinds = ", ".join(sorted({each["name"] for each in flat}))
    free, total = min(each["free_bytes"] for each in flat), device["total_bytes"]
    lines = [
        f"{'devices':<10}{len(flat)} ranks on {device['kind']}, {device['count']} a node: {kinds}, {total / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB free at least"
    ]
    low = [
        f"{index} of {name}"
        for name, devices in zip(names, found, strict=True)
        for index, each in enumerate(devices)
        if each["free_bytes"] < each["total_bytes"] * FREE_SHARE_TO_WARN
    ]
    if low:
        lines.append(f"warning: less than {FREE_SHARE_TO_WARN:.0%} of the memory is free on device {', '.join(low)}.")
    return lines
