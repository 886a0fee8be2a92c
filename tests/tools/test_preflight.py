"""`hf-fsdp preflight` names what keeps nodes from working together.

It names the same on all nodes, and it never hangs. Most tests run the nodes as threads of one
process.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools import preflight
from hf_fsdp_recipes.tools.preflight import Node, check_nodes
from tests.ranks.harness import free_port

ROOT = Path(__file__).resolve().parents[2]
LOCAL = "127.0.0.1"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(preflight, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(preflight, "VISIBLE_SECONDS", 0.3)
    monkeypatch.setattr(preflight, "PROBE_BYTES", 4 << 20)


def make_node(rank, num_machines=2, pid=None, faults=(), **facts):
    facts = {"torch": "2.13"} | facts
    return Node(rank, f"host{rank}", pid or 100 + rank, num_machines, facts, list(faults))


def check_together(nodes, *, address=LOCAL, port=None, directories=None, timeout=2.0):
    """Return for each node the hosts of all nodes, or the message of its error."""
    port = port or free_port()

    def check(node, directory):
        try:
            return check_nodes(node, address, port, directory, timeout)
        except ToolError as error:
            return str(error)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(check, nodes, directories or [None] * len(nodes)))


def test_nodes_that_can_work_together_pass_and_leave_port_and_directory_as_they_were(tmp_path):
    port, directory = free_port(), tmp_path / "new" / "run"
    nodes = [make_node(rank, 3) for rank in (2, 0, 1)]
    for _ in range(2):  # twice, because the job uses the port next
        results = check_together(nodes, port=port, directories=[directory] * 3)
        assert results == [["host0", "host1", "host2"]] * 3
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        (
            [make_node(0, 3), make_node(1, 3), make_node(1, 3, pid=7)],
            "a machine_rank is used more than once: node 1 (host1, pid 7), "
            "node 1 (host1, pid 101). ",
        ),
        (
            [make_node(0), make_node(5)],
            "machine_rank 1 did not join within 2 s; joined: node 0 (host0, pid 100), node 5",
        ),
        (
            [make_node(0, 3), make_node(1, 3, torch="2.12"), make_node(2, 3)],
            "torch differs: 2.13 on node 0 (host0, pid 100); 2.12 on node 1 (host1, pid 101); "
            "2.13 on node 2 (host2, pid 102). ",
        ),
        (
            [make_node(0), make_node(1, faults=["0 accelerators."])],
            "node 1 (host1, pid 101): 0 accelerators.",
        ),
    ],
)
def test_a_fault_of_one_node_is_the_error_of_all(nodes, sentence):
    results = check_together(nodes)
    assert len(set(results)) == 1 and sentence in results[0]


def test_a_missing_node_is_named_when_the_time_is_up():
    started = time.monotonic()
    results = check_together([make_node(0, 3), make_node(2, 3)], timeout=1.0)
    assert len(set(results)) == 1 and time.monotonic() - started < 4
    joined = "joined: node 0 (host0, pid 100), node 2"
    assert f"machine_rank 1 did not join within 1 s; {joined}" in results[0]
    assert "loopback address leads each host to itself" in results[0]


@pytest.mark.parametrize(
    ("rank", "address", "sentence"),
    [
        (0, "no-such-host.invalid", "main_process_ip 'no-such-host.invalid' does not resolve. "),
        (1, "no-such-host.invalid", "main_process_ip 'no-such-host.invalid' does not resolve. "),
        # 192.0.2.1 is reserved by RFC 5737.
        (0, "192.0.2.1", "main_process_ip 192.0.2.1 is not an address of this host. "),
        (1, LOCAL, "(Connection refused). A loopback address leads each host to itself"),
    ],
)
def test_an_address_that_does_not_lead_to_node_0_is_named(rank, address, sentence):
    started = time.monotonic()
    [message] = check_together([make_node(rank)], address=address, timeout=1.0)
    assert message.startswith(f"node {rank} (host{rank}, pid ") and sentence in message
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 400 Bad Request\r\n", b"preflight 17\n"])
def test_a_port_that_another_program_or_job_uses_is_named(answer):
    def serve(server):
        while True:
            try:
                accepted.append(server.accept()[0])
                accepted[-1].sendall(answer)
            except OSError:
                return

    accepted = []
    with socket.create_server((LOCAL, 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        results = check_together([make_node(0), make_node(1)], port=port)
        server.shutdown(socket.SHUT_RDWR)
    for rank, message in enumerate(results):
        assert message.startswith(f"node {rank} (")
        assert f"main_process_port {port} of {LOCAL} is in use" in message


def test_a_second_node_0_is_told_to_take_a_rank_of_its_own():
    first, second = check_together([make_node(0), make_node(0, pid=7)], timeout=1.0)
    early, late = sorted([first, second], key=lambda message: "did not join" in message)
    assert "is in use" in early and "its own --machine_rank" in early
    assert "machine_rank 1 did not join" in late


@pytest.mark.parametrize("report", [None, "no JSON", "7", '{"rank": 1}'])
def test_connections_that_are_no_nodes_are_ignored(report):
    port, nodes = free_port(), [make_node(0), make_node(1)]

    def knock():
        for _ in range(100):
            try:
                with socket.create_connection((LOCAL, port), 1) as connection:
                    if report is not None:
                        connection.sendall(f"{report}\n".encode())
                        assert connection.recv(99).decode() == f"{preflight.GREETING}\n"
                return
            except OSError:
                time.sleep(0.02)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(check_together, nodes[:1], port=port)
        pool.submit(knock).result()
        assert check_together(nodes[1:], port=port) == first.result() == [["host0", "host1"]]


# The output directory


def test_a_directory_that_is_not_shared_is_named_with_the_nodes_whose_files_are_not_there(tmp_path):
    results = check_together(
        [make_node(0), make_node(1)], directories=[tmp_path / "a", tmp_path / "b"]
    )
    assert len(set(results)) == 1
    assert "node 0 (host0, pid 100) does not see the files of node 1 (host1, pid 101)" in results[0]
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    results = check_together(
        [make_node(0), make_node(1)], directories=[tmp_path, tmp_path / "file"]
    )
    assert len(set(results)) == 1
    assert (
        f"node 1 (host1, pid 101): output_dir {tmp_path / 'file'} cannot be written (File exists)."
        in results[0]
    )
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_named(tmp_path, mount):
    mount(tmp_path, 1 << 20)
    [message] = check_together([make_node(0, 1)], directories=[tmp_path])
    assert "cannot be written (No space left on device)." in message and not [*tmp_path.iterdir()]


# The node itself, and the command


def start(rank, port, *arguments, num_machines=2, **variables):
    """Start the command as one node, with the arguments that `hf-fsdp sft` gets."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-c", "from hf_fsdp_recipes.cli import main; main()", "preflight"]
    command += ["--machine_rank", str(rank), "--accelerate_config", "cpu"]
    command += ["--num_machines", str(num_machines), "--num_processes", str(num_machines)]
    command += ["--main_process_ip", LOCAL, "--main_process_port", str(port)]
    command += ["--learning_rate", "1e-4", *map(str, arguments)]
    environment = kept | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("options", "ranks"), [([], 4), (["--num_processes", "6"], 6)])
def test_the_template_says_what_the_command_line_leaves_out(tmp_path, options, ranks):
    template, port = tmp_path / "mine.yaml", free_port()
    template.write_text(
        f"distributed_type: FSDP\nnum_processes: 4\nmain_process_ip: null\n"
        f"main_process_port: {port}\n"
    )
    result = CliRunner().invoke(app, ["preflight", "--accelerate_config", str(template), *options])
    assert f"num_machines 1, num_processes {ranks}, python" in result.output
    assert ", template mine (" in result.output


def test_the_command_compares_versions_and_writes_to_the_directory_of_the_recipe(tmp_path):
    other = tmp_path / "transformers-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    recipe, port = tmp_path / "recipe.yaml", free_port()
    recipe.write_text(f"output_dir: {tmp_path / 'run'}\n")
    nodes = [
        start(0, port, "--config", recipe),
        start(1, port, "--config", recipe, PYTHONPATH=f"{tmp_path}:{ROOT}"),
    ]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], outputs
    assert outputs[0] == outputs[1] and (tmp_path / "run").is_dir()
    _, error = outputs[0]
    assert error.startswith("ToolError: transformers differs: ") and "9.9.9 on node 1 (" in error


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_freezes_while_the_others_wait_ends_the_check_in_time(stop):
    port, started = free_port(), time.monotonic()
    waiting = start(0, port, "--timeout", 15, num_machines=3)
    stopped = start(1, port, "--timeout", 15, num_machines=3)
    try:
        time.sleep(8)
        stopped.send_signal(stop)
        _, error = waiting.communicate(timeout=90)
        assert waiting.returncode == 1 and "did not join" in error
        assert time.monotonic() - started < 60
    finally:
        stopped.kill()
        stopped.wait()
