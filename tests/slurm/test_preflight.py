"""hf-fsdp preflight between two hosts: a broken one gets one line that explains the problem, within a stated time."""

import re
import time

import pytest

pytestmark = pytest.mark.slurm
TIMEOUT_SECONDS = 10
SLACK_SECONDS = 20  # to start Python on two nodes of a machine that has other things to do


def refusal(cluster, port, *, num_nodes=2, rank="$SLURM_NODEID", address="node1", before=""):
    """Run it on both nodes; return the one message that it ends with."""
    command = (
        f"{before} hf-fsdp preflight --num-nodes {num_nodes} --node-rank {rank} --master-addr {address} "
        f"--master-port {port} --timeout {TIMEOUT_SECONDS} --template accelerate_configs/fsdp2_cpu.yaml"
    )
    began = time.monotonic()
    done = cluster.script("run", "srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", command)
    assert done.returncode == 1, done.stdout + done.stderr
    assert time.monotonic() - began < TIMEOUT_SECONDS + SLACK_SECONDS
    messages = set(re.findall(r"^PreflightError: .*", done.stderr, flags=re.MULTILINE))
    assert messages, done.stderr
    return "\n".join(sorted(messages))


def test_healthy_nodes_are_checked_before_they_train(whole):
    checked, trained = whole.text().split("preflight passed in ")
    assert "nodes     node 0 (node1, pid " in checked
    assert "master    node1 (10.77.0.1) port " in checked
    assert "'loss'" in trained
    assert float(trained.split()[0]) < 60


def test_missing_node_is_named(cluster):
    message = refusal(cluster, 21001, num_nodes=3)
    assert f"1 of 3 nodes did not come within {TIMEOUT_SECONDS} s: 2; came: 0 (node1" in message


def test_two_nodes_with_the_same_number_are_named(cluster):
    """What comes of "$SLURM_NODEID" in double quotes: the batch host's number on every node."""
    message = refusal(cluster, 21002, rank="0")
    assert re.search(r"node1.*node2|node2.*node1", message)
    assert re.search("2 processes claim to be node 0|not an address of this host", message)


@pytest.mark.parametrize(
    ("address", "words"),
    [("node2", "not an address of this host"), ("127.0.0.1", "loopback"), ("nod1", "does not resolve")],
)
def test_wrong_master_address_is_named(cluster, address, words):
    message = refusal(cluster, 21003, address=address)
    assert address in message
    assert words in message


def test_port_in_use_and_its_owner_are_named(cluster):
    server = "python3 -m http.server 21004 >/dev/null 2>&1"
    before = f'if [ $SLURM_NODEID = 0 ]; then {server} & trap "kill $!" EXIT; sleep 2; fi;'
    message = refusal(cluster, 21004, before=before)
    assert "port 21004 of node1" in message
    assert "http.server" in message


def test_node_that_cannot_reach_the_master_is_named(cluster):
    rule = ["to", "10.77.0.1", "ipproto", "tcp", "dport", "21005", "unreachable"]
    cluster.run("srun", "--nodelist=node2", "ip", "rule", "add", *rule)
    try:
        message = refusal(cluster, 21005)
    finally:
        cluster.run("srun", "--nodelist=node2", "ip", "rule", "del", *rule)
    assert "node 1 (node2" in message
    assert "10.77.0.1" in message
    assert "1 of 2 nodes did not come" in message


def test_job_whose_output_directory_is_not_shared_does_not_train(submit, cluster, tmp_path):
    output = tmp_path / "job" / "run"
    output.mkdir(parents=True)
    cluster.run("srun", "--nodelist=node2", "mount", "-t", "tmpfs", "none", output)
    try:
        job = submit(PREFLIGHT="1")
        job.wait_until_state("FAILED", 60)
    finally:
        cluster.run("srun", "--nodelist=node2", "umount", output)
    last_words = job.text().split("last words, from ")[1]
    assert re.search(r"^PreflightError: .*node2.*", last_words, flags=re.MULTILINE)
    assert str(output) in last_words
    assert "'loss'" not in job.text()
