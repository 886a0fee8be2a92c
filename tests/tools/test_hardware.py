"""Preflight's checks of GPUs and links, with recorded output of their tools (tests/tools/recorded) and a made-up /sys."""

import re
import time
from pathlib import Path

import pytest

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import hardware
from tests.tools.nodes import common_error, make_nodes, run

RECORDED = Path(__file__).parent / "recorded"
NAMES = ["node 0", "node 1", "node 2"]
PORT = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
DOWN = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}


def read(name):
    return (RECORDED / name).read_text()


def add_tool(directory, name, *outputs):
    """Write an executable that prints the output for its arguments; pairs are (arguments, output)."""
    directory.mkdir(exist_ok=True)
    cases = []
    for number, (arguments, output) in enumerate(outputs):
        (directory / f"{name}.{number}").write_text(output)
        cases.append(f'"{arguments}") exec cat "{directory}/{name}.{number}";;')
    (directory / name).write_text('#!/bin/sh\ncase "$*" in\n' + "\n".join(cases) + "\nesac\nexit 1\n")
    (directory / name).chmod(0o755)


def add_nvidia(directory, xml=None, nvlink=None, dmesg=""):
    xml, nvlink = xml or read("nvidia_smi_h100.xml"), nvlink or read("nvlink_h100.txt")
    add_tool(directory, "nvidia-smi", ("-q -x", xml), ("nvlink -s", nvlink))
    add_tool(directory, "dmesg", ("", dmesg))


def add_sys(root, ports, modules=("nvidia", "nvidia_peermem")):
    for name, files in ports.items():
        directory = root / "class/infiniband" / name / "ports" / "1"
        directory.mkdir(parents=True)
        for file, text in files.items():
            (directory / file).write_text(text + "\n")
    for module in modules:
        (root / "module" / module).mkdir(parents=True)


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Make this machine a node whose tools are in `bin`, its /sys in `sys`, and its /proc in `proc`."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "SYS", tmp_path / "sys")
    monkeypatch.setattr(hardware, "PROC", tmp_path / "proc")
    add_tool(tmp_path / "bin", "dmesg")
    return tmp_path


def test_healthy_node_shows_its_links_and_nothing_else(node):
    add_nvidia(node / "bin", dmesg=read("dmesg.txt").partition("[ 8120")[0])
    add_sys(node / "sys", {"mlx5_0": PORT, "mlx5_1": PORT, "mlx5_9": DOWN})
    found = hardware.collect(on_cpu=False, num_nodes=2)
    assert found["faults"] == found["warnings"] == []
    ((label, text),) = hardware.check([found] * 3, NAMES)
    assert label == "links"
    assert text == (
        "NVLink of NVIDIA H100 80GB HBM3: 18 x 26.562 GB/s per GPU; mlx5_0 port 1, mlx5_1 port 1: 400 Gb/sec (4X NDR); "
        "mlx5_9 port 1: DOWN (Polling); GPUDirect RDMA: nvidia_peermem"
    )


def test_nodes_without_tools_and_jobs_on_cpus_report_nothing(node):
    nothing = {"faults": [], "warnings": [], "links": {}}
    assert hardware.collect(on_cpu=False, num_nodes=2) == nothing
    add_nvidia(node / "bin")
    assert hardware.collect(on_cpu=True, num_nodes=2) == nothing
    assert hardware.check([nothing, nothing], NAMES[:2]) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dram_uncorrectable>0", "dram_uncorrectable>3", "has 3 uncorrectable ECC errors. Reset the GPU or"),
        ("row_pending>No", "row_pending>Yes", "has memory rows that wait to be remapped. Reset the GPU or"),
        ("row_failure>No", "row_failure>Yes", "has memory rows that could not be remapped. Replace the GPU."),
        ("hw_thermal_slowdown>Not ", "hw_thermal_slowdown>", "lowers its clocks because it is too hot. Check"),
        ("power_brake_slowdown>Not ", "power_brake_slowdown>", "lowers its clocks because the power supply asks"),
        ("action>None", "action>Drain and Reset", "needs to recover; the driver asks for: Drain and Reset."),
        ("<state>Completed", "<state>In Progress", "has not joined the NVSwitch fabric. Check nvidia-fabricmanager"),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_unfit_gpu_is_refused(node, monkeypatch, old, new, message, older):
    healthy, _, second = read("nvidia_smi_h100.xml").rpartition("<gpu id")
    xml = f"{healthy}<gpu id{second.replace(old, new, 1)}"
    add_nvidia(node / "bin", xml.replace("clocks_event_reason", "clocks_throttle_reason") if older else xml)
    good = {"faults": [], "warnings": [], "links": {}}
    with pytest.raises(PreflightError, match=rf"^node 1: GPU 1 \(00000000:3B:00\.0\) {re.escape(message)}"):
        hardware.check([good, hardware.collect(on_cpu=False, num_nodes=2)], NAMES[:2])
    for hidden in ("0", "GPU-11111111"):  # the job does not use the GPU
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert hardware.collect(on_cpu=False, num_nodes=2)["faults"] == []


REFUSED = read("nvidia_smi_h100.xml").replace("row_pending>No", "row_pending>Yes")


@pytest.mark.parametrize(
    ("visible", "faulty"),
    [("0, 1", ["GPU 0", "GPU 1"]), ("7, 1", ["GPU 1"]), ("0,", ["GPU 0"]), (" , GPU-2222", ["GPU 1"]), ("", [])],
)
def test_visible_gpus_are_checked_and_no_others(node, monkeypatch, visible, faulty):
    add_nvidia(node / "bin", REFUSED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    faults = hardware.collect(on_cpu=False, num_nodes=2)["faults"]
    assert [fault.partition(" (")[0] for fault in faults] == faulty


@pytest.mark.parametrize(
    "action", ["None", "N/A", "", "[Unknown Error]", "Requested functionality has been deprecated"]
)
def test_only_known_recovery_actions_are_faults(node, action):
    add_nvidia(node / "bin", read("nvidia_smi_h100.xml").replace("action>None", f"action>{action}"))
    assert hardware.collect(on_cpu=False, num_nodes=2)["faults"] == []


def test_report_of_nvidia_smi_is_found_in_other_output(node):
    add_sys(node / "sys", {})
    add_nvidia(node / "bin", f"WARNING: infoROM is corrupted\n{REFUSED}\nWARNING: infoROM is corrupted\n")
    assert len(hardware.collect(on_cpu=False, num_nodes=2)["faults"]) == 2


@pytest.mark.parametrize("old", ["</nvidia_smi_log>", "</gpu>"])
def test_report_that_cannot_be_read_is_a_warning(node, old):
    add_sys(node / "sys", {})
    add_nvidia(node / "bin", REFUSED.replace(old, ""))
    found = hardware.collect(on_cpu=False, num_nodes=2)
    (warning,) = found["warnings"]
    assert found["faults"] == [] and warning.startswith("the report of nvidia-smi cannot be read (")


def test_job_without_gpus_is_told_to_request_some(node):
    add_sys(node / "sys", {})
    add_nvidia(node / "bin", "No devices were found\n")
    (fault,) = hardware.collect(on_cpu=False, num_nodes=2)["faults"]
    assert fault.startswith("nvidia-smi finds no GPU. Request GPUs (--gpus-per-node)")
    add_nvidia(node / "bin", " \n")
    assert hardware.collect(on_cpu=False, num_nodes=2)["faults"] == []


def test_bridged_pair_is_healthy(node):
    """Two of three cards share a bridge; the third has only inactive links."""
    gpu, _, links = read("nvlink_h100.txt").partition("GPU 1")[0].partition("\n")
    unbridged = re.sub(r"26.562 GB/s", "<inactive>", links)
    cards = [gpu.replace("GPU 0", f"GPU {index}").replace("80GB HBM3", "Laptop GPU") for index in range(3)]
    text = f"{cards[0]}\n{links}{cards[1]}\n{links}{cards[2]}\n{unbridged}"
    add_nvidia(node / "bin", nvlink=text)
    found = hardware.collect(on_cpu=False, num_nodes=2)
    state = "18 x 26.562 GB/s on 2 of 3 GPUs; 18 x inactive on 1 of 3 GPUs"
    assert found["warnings"] == [] and found["links"] == {"NVLink of NVIDIA H100 Laptop GPU": state}
    add_nvidia(node / "bin", nvlink=text.replace(unbridged, links))
    other = hardware.collect(on_cpu=False, num_nodes=2)
    _, (label, warning) = hardware.check([found, other], NAMES[:2])
    assert label == "warning" and warning.startswith(f"NVLink of NVIDIA H100 Laptop GPU differs: {state} on node 0;")
    assert len(hardware.check([found, {"faults": [], "warnings": [], "links": {}}], NAMES[:2])) == 1


@pytest.mark.parametrize(
    ("num_nodes", "port", "modules", "state"),
    [
        (1, PORT, ["nvidia"], None),
        (2, DOWN, ["nvidia"], None),
        (2, PORT, ["nvidia", "efa"], None),
        (2, PORT, ["nvidia", "efa", "efa_nv_peermem"], "efa_nv_peermem"),
        (2, PORT, [], None),
    ],
)
def test_gpudirect_is_not_missed_if_unused_or_provided_by_efa(node, num_nodes, port, modules, state):
    add_sys(node / "sys", {"rdmap0": port}, modules)
    found = hardware.collect(on_cpu=False, num_nodes=num_nodes)
    assert found["warnings"] == [] and found["links"].get("GPUDirect RDMA") == state


def test_volta_gpu_with_a_double_bit_error_is_refused(node):
    volatile = "<volatile><single_bit><total>5</total></single_bit><double_bit><total>2</total></double_bit></volatile>"
    gpu = f"<gpu id='0'><ecc_errors>{volatile}</ecc_errors></gpu>"
    add_nvidia(node / "bin", f"<nvidia_smi_log>{gpu}</nvidia_smi_log>")
    (fault,) = hardware.collect(on_cpu=False, num_nodes=2)["faults"]
    assert fault.startswith("GPU 0 (0) has 2 uncorrectable ECC errors.")


def test_tool_that_hangs_or_reports_a_lost_gpu_is_a_fault(node, monkeypatch):
    add_sys(node / "sys", {})
    add_nvidia(node / "bin", "Unable to determine the device handle for GPU0: 0000:19:00.0: GPU is lost\n")
    (fault,) = hardware.collect(on_cpu=False, num_nodes=2)["faults"]
    assert fault == (
        "nvidia-smi reports Unable to determine the device handle for GPU0: 0000:19:00.0: GPU is lost. Reboot the node."
    )
    (node / "bin/nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(hardware, "COMMAND_SECONDS", 0.5)
    started = time.monotonic()
    (fault,) = hardware.collect(on_cpu=False, num_nodes=2)["faults"]
    assert fault == "nvidia-smi did not finish within 0 s. Reboot the node." and time.monotonic() - started < 20


def test_concerns_are_warnings(node):
    xml = read("nvidia_smi_h100.xml").replace("sw_thermal_slowdown>Not ", "sw_thermal_slowdown>", 1)
    nvlink = read("nvlink_h100.txt")[::-1].replace("s/BG 265.62", ">evitcani<", 1)[::-1]
    add_nvidia(node / "bin", xml, nvlink, read("dmesg.txt"))
    add_sys(node / "sys", {"mlx5_0": PORT}, modules=["nvidia"])
    found = hardware.collect(on_cpu=False, num_nodes=2)
    hot, links, xid, gpudirect = found["warnings"]
    assert found["links"]["NVLink of NVIDIA H100 80GB HBM3"] == (
        "18 x 26.562 GB/s on 1 of 2 GPUs; 17 x 26.562 GB/s, 1 x inactive on 1 of 2 GPUs"
    )
    assert found["faults"] == [] and hot.startswith("GPU 0 (00000000:19:00.0) is hot")
    assert links.startswith("GPU 1 has 1 of 18 NVLinks inactive. Reset the GPU or reboot the node.")
    assert xid.startswith("the kernel log has Xid 74 of the GPU at 0000:3b:00 (2 times).")
    assert gpudirect.startswith("GPUDirect RDMA is off") and found["links"]["GPUDirect RDMA"] == "off"
    (node / "proc/driver/nvidia").mkdir(parents=True)
    (node / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20\n"
    )
    assert hardware.collect(on_cpu=False, num_nodes=2)["links"]["GPUDirect RDMA"] == "DMA-BUF"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mlx5_0": PORT, "mlx5_1": DOWN}, "400 Gb/sec (4X NDR) on node 0, node 2; DOWN (Polling) on node 1."),
        (
            {"mlx5_0": PORT, "mlx5_1": PORT | {"rate": "200 Gb/sec (2X NDR)"}},
            "400 Gb/sec (4X NDR) on node 0, node 2; 200 Gb/sec (2X NDR) on node 1.",
        ),
        ({"mlx5_0": PORT}, "400 Gb/sec (4X NDR) on node 0, node 2; missing on node 1."),
    ],
)
def test_port_that_differs_between_nodes_is_a_warning(node, monkeypatch, changed, message):
    add_sys(node / "sys", {"mlx5_0": PORT, "mlx5_1": PORT}, modules=[])
    good = hardware.collect(on_cpu=False, num_nodes=2)
    monkeypatch.setattr(hardware, "SYS", node / "other")
    add_sys(node / "other", changed, modules=[])
    rows = hardware.check([good, hardware.collect(on_cpu=False, num_nodes=2), good], NAMES)
    assert [text for label, text in rows if label == "warning"] == [
        f"mlx5_1 port 1 differs: {message} Check the cables, switches and drivers, or leave a node out."
    ]


@pytest.mark.parametrize("older", [False, True])
def test_unfit_amd_gpus_are_refused(node, older):
    healthy = read("amd_smi_mi300x.json")
    if older:
        healthy = healthy.partition(":")[2].rpartition("}")[0]
    add_tool(node / "bin", "amd-smi", ("metric --ecc --throttle --json", healthy))
    pages = node / "sys/class/drm/card1/device/ras/gpu_vram_bad_pages"
    pages.parent.mkdir(parents=True)
    pages.write_text("0x00000001 : 0x00001000 : R\n")
    assert hardware.collect(on_cpu=False, num_nodes=2) == {"faults": [], "warnings": [], "links": {}}
    pages.write_text("0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P\n")
    faulty = healthy.replace('total_uncorrectable_count": 0', 'total_uncorrectable_count": 1', 1)
    faulty = faulty.replace('hbm_thermal_violation_status": "NOT ', 'hbm_thermal_violation_status": "')
    add_tool(node / "bin", "amd-smi", ("metric --ecc --throttle --json", faulty))
    faults = hardware.collect(on_cpu=False, num_nodes=2)["faults"]
    assert [fault.partition(". ")[0] for fault in faults] == [
        "GPU 0 has 1 uncorrectable ECC errors",
        "GPU 0 lowers its clocks (hbm_thermal)",
        "GPU 1 lowers its clocks (hbm_thermal)",
        "card1 has 1 bad memory pages in use",
    ]


@pytest.mark.parametrize(
    ("variables", "faulty"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0"}, []),
        ({"ROCR_VISIBLE_DEVICES": "0, 1"}, ["GPU 1", "card1"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["GPU 1"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,"}, ["GPU 1"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-f00"}, []),
    ],
)
def test_hidden_amd_gpus_are_not_refused(node, monkeypatch, variables, faulty):
    count = 'total_uncorrectable_count": '
    healthy, _, second = read("amd_smi_mi300x.json").rpartition(f"{count}0")
    add_tool(node / "bin", "amd-smi", ("metric --ecc --throttle --json", f"{healthy}{count}1{second}"))
    for index in range(2):
        pages = node / f"sys/class/drm/card{index}/device/ras/gpu_vram_bad_pages"
        pages.parent.mkdir(parents=True)
        pages.write_text(f"0x00000001 : 0x00001000 : {'RP'[index]}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    faults = hardware.collect(on_cpu=False, num_nodes=2)["faults"]
    assert [fault.partition(" has")[0] for fault in faults] == faulty


def test_faulty_gpu_ends_the_preflight_of_all_nodes(tmp_path):
    add_nvidia(tmp_path / "bin", read("nvidia_smi_h100.xml").replace("row_pending>No", "row_pending>Yes", 1))
    nodes = make_nodes(range(2))
    for each in nodes:
        each.environment = {"ACCELERATE_USE_CPU": "false"}
    nodes[1].environment["PATH"] = f"{tmp_path}/bin:/usr/bin:/bin"
    message = common_error(run(*nodes))
    assert re.search(r"node 1 \(.*\): GPU 0 \(00000000:19:00\.0\) has memory rows that wait to be remapped\.", message)
