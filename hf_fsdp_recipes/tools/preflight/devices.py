"""Checks that the devices of all ranks are alike and have enough free memory."""

from typing import TypedDict

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight.node_info import Row, list_differences, shorten

MIN_FREE_FRACTION = 0.5  # if a smaller share of the memory is free, another program is using the device
WARN_FREE_FRACTION = 0.9
MEMORY_TOLERANCE = 0.02  # total memory varies a little with drivers and ECC settings


class DeviceInfo(TypedDict):
    """A rank's device. `count` is the number of devices on its node; the byte counts are 0 if unknown."""

    kind: str
    count: int
    name: str
    free_bytes: int
    total_bytes: int


def check_devices(devices_by_node: list[list[DeviceInfo]], names: list[str], ranks_per_node: int) -> list[Row]:
    """Return the preflight table's row about devices, and a warning if other programs use some of them.

    Raises a PreflightError if the devices of the nodes differ, are too few, or have too little free memory.
    """
    first = [devices[0] for devices in devices_by_node]
    differences = list_differences([device["kind"] for device in first], names)
    errors = [f"the type of devices differs: {differences}. Check the drivers on each node."] if differences else []
    errors += [
        f"{name} has {device['count']} {device['kind']} devices for {ranks_per_node} ranks. Start fewer ranks per node, or "
        f"request more devices (--gpus-per-node, CUDA_VISIBLE_DEVICES)."
        for name, device in zip(names, first, strict=True)
        if device["kind"] != "cpu" and device["count"] < ranks_per_node
    ]
    labeled = [
        (f"device {index} of {name}", device)
        for name, devices in zip(names, devices_by_node, strict=True)
        for index, device in enumerate(devices)
    ]
    if errors := errors or _find_memory_errors(labeled):
        raise PreflightError(" ".join(errors))
    return _describe(labeled)


def _find_memory_errors(labeled: list[tuple[str, DeviceInfo]]) -> list[str]:
    errors = [
        f"{label} is busy: {device['free_bytes'] / 1e9:.1f} of {device['total_bytes'] / 1e9:.1f} GB free. Stop the process "
        f"that uses the device (nvidia-smi lists it)."
        for label, device in labeled
        if device["free_bytes"] < device["total_bytes"] * MIN_FREE_FRACTION
    ]
    by_size = sorted(labeled, key=lambda each: each[1]["total_bytes"])
    if by_size[0][1]["total_bytes"] < by_size[-1][1]["total_bytes"] * (1 - MEMORY_TOLERANCE):
        sizes = "; ".join(
            f"{label} ({device['name']}) has {device['total_bytes'] / 1e9:.1f} GB"
            for label, device in (by_size[0], by_size[-1])
        )
        errors.append(f"device memory differs: {sizes}. The smallest limits all ranks; use nodes of one kind.")
    return errors


def _describe(labeled: list[tuple[str, DeviceInfo]]) -> list[Row]:
    device = labeled[0][1]
    if device["kind"] == "cpu":
        return [("devices", "CPU ranks")]
    models = ", ".join(sorted({each["name"] for _, each in labeled}))
    min_free_bytes = min(each["free_bytes"] for _, each in labeled)
    text = (
        f"{len(labeled)} ranks on {device['kind']}, {device['count']} devices per node: {models}, "
        f"{device['total_bytes'] / 1e9:.1f} GB each, at least {min_free_bytes / 1e9:.1f} GB free"
    )
    used = [label for label, each in labeled if each["free_bytes"] < each["total_bytes"] * WARN_FREE_FRACTION]
    if not used:
        return [("devices", text)]
    return [
        ("devices", text),
        ("warning", f"less than {WARN_FREE_FRACTION:.0%} of the memory is free on {shorten(used)}."),
    ]
