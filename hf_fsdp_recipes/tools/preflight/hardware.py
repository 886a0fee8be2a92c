"""Finds faulty GPUs and links from the output of nvidia-smi and amd-smi, the kernel log and /sys.

The checks need no privileges. Tools and files that a node does not have are skipped.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight.node_info import Row, list_differences, shorten

SYS, PROC = Path("/sys"), Path("/proc")
COMMAND_SECONDS = 45.0  # healthy nodes with eight GPUs may need half of this time

RESET = "Reset the GPU or reboot the node."
COOLING = "Check the power supply and the cooling of the node."
# Elements of `nvidia-smi -q -x` that are "Yes" or "Active" on an unfit GPU.
NVIDIA_FAULTS = {
    "remapped_row_pending": f"has memory rows that wait to be remapped. {RESET}",
    "remapped_row_failure": "has memory rows that could not be remapped. Replace the GPU.",
    "pending_retirement": f"has memory pages that wait to be retired. {RESET}",
    "clocks_event_reason_hw_thermal_slowdown": f"lowers its clocks because it is too hot. {COOLING}",
    "clocks_event_reason_hw_power_brake_slowdown": f"lowers its clocks because the power supply asks for it. {COOLING}",
}
# Causes of throttling that `amd-smi metric --json` reports as "ACTIVE" on an unfit GPU.
AMD_FAULTS = ("prochot", "socket_thermal", "vr_thermal", "hbm_thermal")
PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
# Xid errors of the hardware and the driver, not of programs. Source: NVIDIA, "XID Errors", table of Xid numbers.
HARDWARE_XIDS = {48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143}
_XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+)")
_NVLINKS_OF_GPU = re.compile(r"^GPU (\d+): (.*?) \(UUID.*\n((?:[ \t]+.*\n?)*)", re.MULTILINE)
_NVLINK = re.compile(r"Link \d+: (?:([\d.]+ GB/s)|<inactive>)")


class Hardware(TypedDict):
    """What a node reports: faults of unfit GPUs, warnings, and a dict from each link's name to its state or rate."""

    faults: list[str]
    warnings: list[str]
    links: dict[str, str]


def collect(on_cpu: bool, num_nodes: int) -> Hardware:
    """Return what this node's GPUs and network ports report; the report is empty for a job on CPUs."""
    found: Hardware = {"faults": [], "warnings": [], "links": {}}
    if not on_cpu:
        for read in (_read_nvidia, _read_nvlinks, _read_xids, _read_amd, _read_amd_pages):
            read(found)
        if _read_ports(found) and num_nodes > 1:
            _read_gpudirect(found)
    return found


def check(found: list[Hardware], names: list[str]) -> list[Row]:
    """Return the preflight table's row about links, and warnings; raise PreflightError if a GPU is unfit."""
    faults = [f"{name}: {fault}" for node, name in zip(found, names, strict=True) for fault in node["faults"]]
    if faults:
        raise PreflightError(" ".join(faults))
    warnings = [f"{name}: {text}" for node, name in zip(found, names, strict=True) for text in node["warnings"]]
    for link in sorted({link for node in found for link in node["links"]}):
        states = [node["links"].get(link, "missing") for node in found]
        # Skip nodes that do not list a GPU's NVLinks: they have other GPUs, or an nvidia-smi that cannot list NVLinks.
        listed = [index for index, state in enumerate(states) if state != "missing" or not link.startswith("NVLink")]
        differences = list_differences([states[index] for index in listed], [names[index] for index in listed])
        if differences:
            warnings.append(
                f"{link} differs: {differences}. Check the cables, switches and drivers, or leave a node out."
            )
    links: dict[str, list[str]] = {}  # for each state, the links of the first node in that state
    for link, state in found[0]["links"].items():
        links.setdefault(state, []).append(link)
    text = "; ".join(f"{shorten(same)}: {state}" for state, same in links.items())
    rows: list[Row] = [("links", text)] if links else []
    return [*rows, *(("warning", warning) for warning in warnings)]


def _run(found: Hardware, *command: str) -> str:
    """Run a command and return its output, or "" if it is not installed or an earlier command already found a fault.

    If the command hangs, that is recorded as a fault.
    """
    if shutil.which(command[0]) is None or found["faults"]:
        return ""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
    try:
        return process.communicate(timeout=COMMAND_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # no wait(): it would hang, as a process that is stuck on a failed GPU does not die
        found["faults"].append(f"{command[0]} did not finish within {COMMAND_SECONDS:.0f} s. Reboot the node.")
        return ""


def _split_variable(name: str) -> list[str] | None:
    """Return the entries of an environment variable that lists devices; None if it is not set."""
    value = os.environ.get(name)
    return None if value is None else [entry.strip() for entry in value.split(",") if entry.strip()]


def _query_nvidia(found: Hardware) -> list[ElementTree.Element]:
    """Return nvidia-smi's report on each GPU. If the driver is loaded but nvidia-smi prints no report, record a fault."""
    text = _run(found, "nvidia-smi", "-q", "-x").strip()
    start, end_tag = text.find("<nvidia_smi_log"), "</nvidia_smi_log>"
    if start >= 0:  # other text may surround the report
        try:
            return ElementTree.fromstring(text[start : text.find(end_tag) + len(end_tag)]).findall("gpu")
        except ElementTree.ParseError as error:
            found["warnings"].append(
                f"the report of nvidia-smi cannot be read ({error}), so the GPUs were not checked."
            )
    elif "No devices were found" in text:
        found["faults"].append(
            "nvidia-smi finds no GPU. Request GPUs (--gpus-per-node), or set ACCELERATE_USE_CPU=true to use the CPU."
        )
    elif text and (SYS / "module/nvidia").is_dir():
        found["faults"].append(f"nvidia-smi reports {text.splitlines()[0].rstrip('.')}. Reboot the node.")
    return []


def _read_nvidia(found: Hardware) -> None:
    visible = _split_variable("CUDA_VISIBLE_DEVICES")
    for index, gpu in enumerate(_query_nvidia(found)):
        uuid, name = gpu.findtext("uuid", ""), f"GPU {index} ({gpu.get('id')})"
        if visible is not None and not any(str(index) == each or uuid.startswith(each) for each in visible):
            continue
        # Drivers before 535 say "throttle" instead of "event".
        values = {each.tag.replace("throttle", "event"): (each.text or "").strip() for each in gpu.iter()}
        volatile = gpu.find("ecc_errors/volatile")
        counts = [] if volatile is None else [each.text for each in volatile.iter() if "uncorrectable" in each.tag]
        counts += [gpu.findtext("ecc_errors/volatile/double_bit/total")]  # the counter of GPUs before Ampere
        if num_errors := sum(int(count) for count in counts if count and count.strip().isdigit()):
            found["faults"].append(f"{name} has {num_errors} uncorrectable ECC errors. {RESET}")
        for tag, problem in NVIDIA_FAULTS.items():
            if values.get(tag) in ("Yes", "Active"):
                found["faults"].append(f"{name} {problem}")
        if re.search("Reset|Reboot|Drain", action := values.get("gpu_recovery_action", "")):
            found["faults"].append(f"{name} needs to recover; the driver asks for: {action}. {RESET}")
        if gpu.findtext("fabric/state") == "In Progress":
            found["faults"].append(
                f"{name} has not joined the NVSwitch fabric. Check nvidia-fabricmanager on the node."
            )
        if values.get("clocks_event_reason_sw_thermal_slowdown") == "Active":
            found["warnings"].append(f"{name} is hot, and the driver lowers its clocks. {COOLING}")


def _read_nvlinks(found: Hardware) -> None:
    states: dict[str, list[str]] = {}  # for each GPU model, one description of links per GPU
    for index, name, lines in _NVLINKS_OF_GPU.findall(_run(found, "nvidia-smi", "nvlink", "-s")):
        counts = Counter(rate or "inactive" for rate in _NVLINK.findall(lines))
        states.setdefault(name, []).append(", ".join(f"{count} x {state}" for state, count in sorted(counts.items())))
        if 0 < (num_inactive := counts["inactive"]) < counts.total():
            found["warnings"].append(
                f"GPU {index} has {num_inactive} of {counts.total()} NVLinks inactive. {RESET} Ignore this if the NVLink "
                f"bridges of this machine use only some of the links."
            )
    for name, each in states.items():
        if any(each):
            text = "; ".join(
                f"{state or 'none'} on {count} of {len(each)} GPUs" for state, count in Counter(each).most_common()
            )
            found["links"][f"NVLink of {name}"] = text if len(set(each)) > 1 else f"{each[0]} per GPU"


def _read_xids(found: Hardware) -> None:
    errors = Counter(each for each in _XID.findall(_run(found, "dmesg")) if int(each[1]) in HARDWARE_XIDS)
    for (address, number), count in errors.items():
        found["warnings"].append(
            f"the kernel log has Xid {number} of the GPU at {address} ({count} times). Look it up in NVIDIA's list of Xid "
            f"errors; most need a reset."
        )


def _read_amd(found: Hardware) -> None:
    gpus: Any = []
    with contextlib.suppress(ValueError):  # without --ecc and --throttle, amd-smi is slow
        report = json.loads(_run(found, "amd-smi", "metric", "--ecc", "--throttle", "--json"))
        gpus = report.get("gpu_data", []) if isinstance(report, dict) else report  # the report is a list before ROCm 7
    visible = _find_visible_amd(len(gpus))
    for gpu in (gpu for index, gpu in enumerate(gpus) if index in visible):
        name, ecc, throttle = f"GPU {gpu.get('gpu')}", gpu.get("ecc"), gpu.get("throttle")
        num_errors = ecc.get("total_uncorrectable_count") if isinstance(ecc, dict) else 0
        if isinstance(num_errors, int) and num_errors:
            found["faults"].append(f"{name} has {num_errors} uncorrectable ECC errors. {RESET}")
        for reason in AMD_FAULTS if isinstance(throttle, dict) else ():
            if throttle.get(f"{reason}_violation_status") == "ACTIVE":
                found["faults"].append(f"{name} lowers its clocks ({reason}). {COOLING}")


def _find_visible_amd(num_gpus: int) -> list[int]:
    """Return the indices of the GPUs that ROCm makes visible to this job. GPUs listed by UUID count as hidden."""
    visible = list(range(num_gpus))
    # HIP's indices count from 0, among the GPUs that ROCR makes visible. Without HIP_VISIBLE_DEVICES, HIP reads CUDA's
    # variable.
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for name in ("ROCR_VISIBLE_DEVICES", hip):
        if (entries := _split_variable(name)) is not None:
            visible = [visible[int(each)] for each in entries if each.isdigit() and int(each) < len(visible)]
    return visible


def _read_amd_pages(found: Hardware) -> None:
    """Report bad memory pages that are still in use.

    Each line of `gpu_vram_bad_pages` has a page's address, size and state: R (reserved), P (pending) or F (could not be
    reserved). Source: Linux documentation, "AMDGPU RAS Support".
    """
    files = sorted((SYS / "class/drm").glob("card*/device/ras/gpu_vram_bad_pages"))
    if len(_find_visible_amd(len(files))) < len(files):
        return  # cards cannot be matched to GPUs, so the fault could belong to a hidden GPU
    for file in files:
        with contextlib.suppress(OSError):
            if pending := re.findall(r": [PF]\s*$", file.read_text(), re.MULTILINE):
                card = file.relative_to(SYS / "class/drm").parts[0]
                found["faults"].append(f"{card} has {len(pending)} bad memory pages in use. {RESET}")


def _read_ports(found: Hardware) -> bool:
    """Report the state of each InfiniBand and RoCE port; return whether any of them is active."""
    has_active = False
    for port in sorted((SYS / "class/infiniband").glob("*/ports/*")):
        with contextlib.suppress(OSError):
            state, physical, rate = (
                (port / name).read_text().split(": ")[-1].strip() for name in ("state", "phys_state", "rate")
            )
            label = f"{port.parts[-3]} port {port.name}"
            found["links"][label] = rate if state == "ACTIVE" else f"{state} ({physical})"
            has_active = has_active or state == "ACTIVE"
    return has_active


def _read_gpudirect(found: Hardware) -> None:
    loaded = [name for name in ("nvidia", "efa", *PEER_MEMORY_MODULES) if (SYS / "module" / name).is_dir()]
    module = next((name for name in PEER_MEMORY_MODULES if name in loaded), None)
    with contextlib.suppress(OSError):
        if "Open Kernel Module" in (PROC / "driver/nvidia/version").read_text():
            module = module or "DMA-BUF"
    if "nvidia" not in loaded or (module is None and "efa" in loaded):  # EFA's own driver may provide GPUDirect
        return
    found["links"]["GPUDirect RDMA"] = module or "off"
    if module is None:
        found["warnings"].append(
            "GPUDirect RDMA is off: transfers between nodes are copied through host memory. Run sudo modprobe nvidia_peermem."
        )
