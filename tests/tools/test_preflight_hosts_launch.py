"""The preflight on two hosts: network namespaces with their own names and addresses, and a link between them."""

import os
import re
import shutil
import subprocess

import pytest

from tests.recipes.launching import ROOT
from tests.tools.nodes import common_error, make_nodes, run
from tests.tools.test_preflight_launch import SLACK_SECONDS

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
)
ADDRESSES = {"nodea": "10.213.7.1", "nodeb": "10.213.7.2"}
# Enters a host: its network, its name, its /etc/hosts, and what else a test mounts.
ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; eval "$2"; shift 2; exec "$@"'


class Hosts:
    """Two hosts that reach each other through eth0."""

    def __init__(self, directory):
        self.namespaces = {host: f"preflight-{os.getpid()}-{host}" for host in ADDRESSES}
        self.names = directory / "hosts"
        self.names.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {host}\n" for host, a in ADDRESSES.items()))
        for namespace in self.namespaces.values():
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        first, second = self.namespaces.values()
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for host, namespace in self.namespaces.items():
            ip("-n", namespace, "address", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")

    def remove(self):
        for namespace in self.namespaces.values():
            ip("netns", "delete", namespace, check=False)

    def place(self, nodes, mounts=("", ""), names=(None, None)):
        """Let node n of a job start on host n."""
        for node, (host, namespace), mount, file in zip(nodes, self.namespaces.items(), mounts, names, strict=True):
            enter = ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-ec", ENTER, host]
            node.prefix = [*enter, str(file or self.names), mount]
        return nodes


def ip(*arguments, check=True):
    subprocess.run(["ip", *arguments], check=check, timeout=10, capture_output=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = None
    try:
        made = Hosts(tmp_path_factory.mktemp("hosts"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield made
    made.remove()


@pytest.mark.slow
def test_two_hosts_pass_by_name_and_bandwidth_between_them_is_measured(hosts, tmp_path):
    first, second = run(*hosts.place(make_nodes([0, 1], master_addr="nodea", output_dir=tmp_path)))
    assert (first.status, second.status) == (0, 0), first.error
    assert "node 0 (nodea, pid " in first.output
    assert "node 1 (nodeb, pid " in first.output
    assert f"nodea ({ADDRESSES['nodea']}) port " in first.output
    assert re.search("between .* [GM]B/s between nodes", first.output)


@pytest.mark.slow
def test_loopback_master_is_reported_on_both_hosts(hosts):
    first, second = run(*hosts.place(make_nodes([0, 1], master_addr="127.0.0.1", timeout=3)))
    assert (first.status, second.status) == (1, 1)
    assert "1 of 2 nodes did not join" in first.error
    assert "is loopback, which other hosts cannot reach" in first.error
    assert "node 1 (nodeb" in second.error
    assert "reaches only the host itself" in second.error


@pytest.mark.slow
def test_address_of_the_wrong_host_is_reported_on_both(hosts):
    first, second = run(*hosts.place(make_nodes([0, 1], master_addr="nodeb", timeout=3)))
    assert (first.status, second.status) == (1, 1)
    assert "is not an address of this host (10.213.7.1" in first.error
    assert "scontrol show hostnames" in first.error
    assert "node 1 (nodeb" in second.error
    assert f"nothing is listening at nodeb ({ADDRESSES['nodeb']})" in second.error
    assert max(first.seconds, second.seconds) < 3 + SLACK_SECONDS


@pytest.mark.slow
def test_every_host_with_node_rank_0_is_named(hosts):
    message = common_error(run(*hosts.place(make_nodes([0, 0], master_addr="nodea"))))
    assert "2 processes claim to be node 0: nodea, pid " in message
    assert " and nodeb, pid " in message


@pytest.fixture
def blocked_replies(hosts):
    """Block replies from the first host to the second, as a firewall would."""
    route = ("-n", hosts.namespaces["nodea"], "route")
    ip(*route, "add", "blackhole", f"{ADDRESSES['nodeb']}/32")
    yield
    ip(*route, "delete", "blackhole", f"{ADDRESSES['nodeb']}/32")


@pytest.mark.slow
def test_host_that_cannot_reach_the_master_is_named_on_both(hosts, blocked_replies):
    first, second = run(*hosts.place(make_nodes([0, 1], master_addr="nodea", timeout=4)))
    assert (first.status, second.status) == (1, 1)
    assert "did not join within 4 s: 1; joined: 0 (nodea" in first.error
    assert "node 1 (nodeb" in second.error
    assert "cannot be reached after" in second.error
    assert "firewall" in second.error
    assert max(first.seconds, second.seconds) < 4 + SLACK_SECONDS


@pytest.mark.slow
def test_directory_of_the_same_name_on_each_hosts_own_disk_is_not_shared(hosts, tmp_path):
    nodes = make_nodes([0, 1], master_addr="nodea", output_dir=tmp_path)
    message = common_error(run(*hosts.place(nodes, mounts=("", f"mount -t tmpfs none {tmp_path}"))))
    assert f"output directory {tmp_path} is not shared: node 0 (nodea" in message
    assert "node 1 (nodeb" in message.split("is not shared")[1]


@pytest.mark.slow
def test_host_with_a_full_disk_is_named(hosts, tmp_path):
    nodes = make_nodes([0, 1], master_addr="nodea", output_dir=tmp_path)
    message = common_error(run(*hosts.place(nodes, mounts=("", f"mount -t tmpfs -o size=1m none {tmp_path}"))))
    assert message.startswith("PreflightError: node 1 (nodeb")
    assert "No space left on device" in message


@pytest.mark.slow
def test_hosts_whose_names_mean_loopback_are_named_before_gloo_fails(hosts, tmp_path):
    files = [tmp_path / host for host in ADDRESSES]
    for file in files:
        file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {file.name}\n")  # as Debian's installer writes it
    results = run(*hosts.place(make_nodes([0, 1], master_addr=ADDRESSES["nodea"]), names=files))
    message = common_error(results)
    assert all(f"its host name {host} resolves to 127.0.1.1" in message for host in ADDRESSES)
    assert "Export GLOO_SOCKET_IFNAME=eth0" in message
    assert max(result.seconds for result in results) < SLACK_SECONDS


@pytest.mark.slow
def test_missing_network_interface_is_named_with_the_right_one(hosts):
    nodes = hosts.place(make_nodes([0, 1], master_addr="nodea"))
    nodes[1].environment = {"GLOO_SOCKET_IFNAME": "ib7"}
    results = run(*nodes)
    message = common_error(results)
    assert max(result.seconds for result in results) < 2 * SLACK_SECONDS
    assert "node 1 (nodeb" in message
    assert "ib7" in message
    assert "GLOO_SOCKET_IFNAME=eth0" in message


@pytest.fixture
def slow_link(hosts):
    """Limit the link between the hosts to 8 Mbit per second, which is 1 MB per second."""
    if shutil.which("tc") is None:
        pytest.skip("no tc (iproute2) to slow the link with")
    for namespace in hosts.namespaces.values():
        limit = ["root", "tbf", "rate", "8mbit", "burst", "64kb", "latency", "400ms"]
        subprocess.run(["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", "eth0", *limit], check=True)
    yield
    for namespace in hosts.namespaces.values():
        subprocess.run(["ip", "netns", "exec", namespace, "tc", "qdisc", "delete", "dev", "eth0", "root"], check=True)


@pytest.mark.slow
def test_slow_link_is_measured_and_hybrid_advised(hosts, slow_link, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("per_device_train_batch_size: 1\nmax_length: 32\n")
    template = ROOT / "accelerate_configs" / "fsdp2_full_shard.yaml"
    nodes = make_nodes([0, 1], master_addr="nodea", nproc_per_node=2, template=template, config=recipe)
    first, second = run(*hosts.place(nodes))
    assert (first.status, second.status) == (0, 0), first.error
    (between,) = re.findall(r"between +all-gather ([0-9.]+) MB/s", first.output)
    assert 0.4 < float(between) < 1.2
    assert "times too slow. Use hybrid_shard if the model fits on one node" in first.output
