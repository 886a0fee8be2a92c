"""hf-fsdp preflight between two Slurm nodes reports every fault in one line and in time."""

import re
import time

import pytest

pytestmark = pytest.mark.slurm
TIMEOUT_SECONDS = 15
SLACK_SECONDS = 45  # to start Python and import torch on a busy machine


def run_failing(cluster, port, *, num_nodes=2, rank="$SLURM_NODEID", address="node1", before=""):
    """Run the preflight on both nodes; return their distinct error messages."""
    command = (
        f"{before} hf-fsdp preflight --num-nodes {num_nodes} --node-rank {rank} --master-addr {address} "
        f"--master-port {port} --timeout {TIMEOUT_SECONDS} --template accelerate_configs/fsdp2_cpu.yaml"
    )
    started = time.monotonic()
    done = cluster.script("run", "srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", command)
    assert done.returncode == 1, done.stdout + done.stderr
    assert time.monotonic() - started < TIMEOUT_SECONDS + SLACK_SECONDS
    messages = set(re.findall(r"^PreflightError: .*", done.stderr, flags=re.MULTILINE))
    assert messages, done.stderr
    return "\n".join(sorted(messages))


def test_healthy_nodes_are_checked_before_they_train(undisturbed):
    checked, trained = undisturbed.text().split("preflight passed in ")
    assert "nodes     node 0 (node1, pid " in checked
    assert "master    node1 (10.77.0.1) port " in checked
    assert "'loss'" in trained
    assert float(trained.split()[0]) < 60


def test_missing_node_is_named(cluster):
    message = run_failing(cluster, 21001, num_nodes=3)
    assert f"1 of 3 nodes did not join within {TIMEOUT_SECONDS} s: 2; joined: " in message


def test_two_nodes_with_one_rank_are_named(cluster):
    """In double quotes, "$SLURM_NODEID" expands in the batch script, so every node gets the same rank."""
    message = run_failing(cluster, 21002, rank="0")
    assert re.search(r"node1.*node2|node2.*node1", message)
    assert re.search("2 processes claim to be node 0|not an address of this host", message)


@pytest.mark.parametrize(
    ("address", "problem"),
    [("node2", "not an address of this host"), ("127.0.0.1", "loopback"), ("nod1", "does not resolve")],
)
def test_wrong_master_address_is_named(cluster, address, problem):
    message = run_failing(cluster, 21003, address=address)
    assert address in message
    assert problem in message


def test_port_in_use_and_the_process_that_holds_it_are_named(cluster):
    server = "python3 -m http.server 21004 >/dev/null 2>&1"
    before = f'if [ $SLURM_NODEID = 0 ]; then {server} & trap "kill $!" EXIT; sleep 2; fi;'
    message = run_failing(cluster, 21004, before=before)
    assert "port 21004 of node1" in message
    assert "http.server" in message


def test_node_that_cannot_reach_the_master_is_named(cluster):
    rule = ["to", "10.77.0.1", "ipproto", "tcp", "dport", "21005", "unreachable"]
    cluster.run("srun", "--nodelist=node2", "ip", "rule", "add", *rule)
    try:
        message = run_failing(cluster, 21005)
    finally:
        cluster.run("srun", "--nodelist=node2", "ip", "rule", "del", *rule)
    assert "node 1 (node2" in message
    assert "10.77.0.1" in message
    assert "1 of 2 nodes did not join" in message


def test_job_whose_output_directory_is_not_shared_does_not_train(submit, cluster, tmp_path):
    output = tmp_path / "job" / "run"
    output.mkdir(parents=True)
    cluster.run("srun", "--nodelist=node2", "mount", "-t", "tmpfs", "none", output)
    try:
        job = submit(PREFLIGHT="1")
        job.wait_until_state("FAILED", 60)
    finally:
        cluster.run("srun", "--nodelist=node2", "umount", output)
    error = job.text().split("errors found in ")[1]
    assert re.search(r"^PreflightError: .*node2.*", error, flags=re.MULTILINE)
    assert str(output) in error
    assert "'loss'" not in job.text()
