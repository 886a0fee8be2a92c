"""The preflight on two hosts: network namespaces with names, addresses and a link between them."""

import os
import re
import shutil
import subprocess

import pytest

from tests.nodes import job, one_message, run
from tests.recipes.launching import ROOT
from tests.test_preflight import SLACK_SECONDS

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
)
ADDRESSES = {"nodea": "10.213.7.1", "nodeb": "10.213.7.2"}
# Enter a host: its network, its name, its /etc/hosts, and whatever else a test wants to mount.
ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; eval "$2"; shift 2; exec "$@"'


class Hosts:
    """Two hosts that reach each other through eth0."""

    def __init__(self, directory):
        self.spaces = {host: f"preflight-{os.getpid()}-{host}" for host in ADDRESSES}
        self.names = directory / "hosts"
        self.names.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {host}\n" for host, a in ADDRESSES.items()))
        for space in self.spaces.values():
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        first, second = self.spaces.values()
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for host, space in self.spaces.items():
            ip("-n", space, "address", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")

    def remove(self):
        for space in self.spaces.values():
            ip("netns", "delete", space, check=False)

    def put(self, nodes, mounts=("", ""), names=(None, None)):
        """Start node n of a job on host n."""
        for node, (host, space), mount, file in zip(nodes, self.spaces.items(), mounts, names, strict=True):
            enter = ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-ec", ENTER, host]
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


def test_two_hosts_pass_by_name_and_the_link_is_measured(hosts, tmp_path):
    first, second = run(*hosts.put(job([0, 1], master_addr="nodea", output_dir=tmp_path)))
    assert (first.status, second.status) == (0, 0), first.error
    assert "node 0 (nodea, pid " in first.output and "node 1 (nodeb, pid " in first.output
    assert f"nodea ({ADDRESSES['nodea']}) port " in first.output and "GB/s between nodes" in first.output


def test_loopback_master_is_reported_on_both_hosts(hosts):
    first, second = run(*hosts.put(job([0, 1], master_addr="127.0.0.1", timeout=3)))
    assert (first.status, second.status) == (1, 1)
    assert "1 of 2 nodes did not come" in first.error and "is loopback, which other hosts cannot reach" in first.error
    assert "node 1 (nodeb" in second.error and "reaches only the host itself" in second.error


def test_address_of_the_wrong_host_is_reported_on_both(hosts):
    first, second = run(*hosts.put(job([0, 1], master_addr="nodeb", timeout=3)))
    assert (first.status, second.status) == (1, 1)
    assert "is not an address of this host (10.213.7.1" in first.error and "scontrol show hostnames" in first.error
    assert "node 1 (nodeb" in second.error and f"nobody listens at nodeb ({ADDRESSES['nodeb']})" in second.error
    assert max(first.seconds, second.seconds) < 3 + SLACK_SECONDS


def test_every_host_with_number_0_is_named(hosts):
    message = one_message(run(*hosts.put(job([0, 0], master_addr="nodea"))))
    assert "2 processes claim to be node 0: nodea, pid " in message and " and nodeb, pid " in message


@pytest.fixture
def silent_wire(hosts):
    """Let nothing come back from the first host to the second, as a firewall would."""
    route = ("-n", hosts.spaces["nodea"], "route")
    ip(*route, "add", "blackhole", f"{ADDRESSES['nodeb']}/32")
    yield
    ip(*route, "delete", "blackhole", f"{ADDRESSES['nodeb']}/32")


def test_host_that_cannot_reach_the_master_is_reported_on_both(hosts, silent_wire):
    first, second = run(*hosts.put(job([0, 1], master_addr="nodea", timeout=4)))
    assert (first.status, second.status) == (1, 1)
    assert "did not come within 4 s: 1; came: 0 (nodea" in first.error
    assert "node 1 (nodeb" in second.error and "cannot be reached in" in second.error and "firewall" in second.error
    assert max(first.seconds, second.seconds) < 4 + SLACK_SECONDS


def test_directory_of_the_same_name_on_a_disk_of_each_host_is_not_shared(hosts, tmp_path):
    nodes = job([0, 1], master_addr="nodea", output_dir=tmp_path)
    message = one_message(run(*hosts.put(nodes, mounts=("", f"mount -t tmpfs none {tmp_path}"))))
    assert f"output directory {tmp_path} is not shared: node 0 (nodea" in message
    assert "node 1 (nodeb" in message.split("is not shared")[1]


def test_host_with_a_full_disk_is_named(hosts, tmp_path):
    nodes = job([0, 1], master_addr="nodea", output_dir=tmp_path)
    message = one_message(run(*hosts.put(nodes, mounts=("", f"mount -t tmpfs -o size=1m none {tmp_path}"))))
    assert message.startswith("PreflightError: node 1 (nodeb") and "No space left on device" in message


def test_hosts_whose_names_mean_loopback_are_reported_before_gloo_fails(hosts, tmp_path):
    files = [tmp_path / host for host in ADDRESSES]
    for file in files:
        file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {file.name}\n")  # as Debian's installer writes it
    outcomes = run(*hosts.put(job([0, 1], master_addr=ADDRESSES["nodea"]), names=files))
    message = one_message(outcomes)
    assert all(f"its own name {host} means 127.0.1.1" in message for host in ADDRESSES)
    assert "export GLOO_SOCKET_IFNAME=eth0" in message
    assert max(outcome.seconds for outcome in outcomes) < SLACK_SECONDS


def test_missing_interface_is_named_with_the_one_to_use(hosts):
    nodes = hosts.put(job([0, 1], master_addr="nodea"))
    nodes[1].environment = {"GLOO_SOCKET_IFNAME": "ib7"}
    outcomes = run(*nodes)
    message = one_message(outcomes)
    assert max(outcome.seconds for outcome in outcomes) < 2 * SLACK_SECONDS
    assert "node 1 (nodeb" in message and "ib7" in message and "GLOO_SOCKET_IFNAME=eth0" in message


@pytest.fixture
def slow_wire(hosts):
    """Let 8 Mbit a second through, a megabyte."""
    if shutil.which("tc") is None:
        pytest.skip("no tc (iproute2) to slow the wire with")
    for space in hosts.spaces.values():
        shape = ["root", "tbf", "rate", "8mbit", "burst", "64kb", "latency", "400ms"]
        subprocess.run(["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", *shape], check=True)
    yield
    for space in hosts.spaces.values():
        subprocess.run(["ip", "netns", "exec", space, "tc", "qdisc", "delete", "dev", "eth0", "root"], check=True)


@pytest.mark.slow
def test_slow_link_is_measured_and_hybrid_is_advised(hosts, slow_wire, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("per_device_train_batch_size: 1\nmax_length: 32\n")
    template = ROOT / "accelerate_configs" / "fsdp2_full_shard.yaml"
    nodes = job([0, 1], master_addr="nodea", nproc_per_node=2, template=template, config=recipe)
    first, second = run(*hosts.put(nodes))
    assert (first.status, second.status) == (0, 0), first.error
    (between,) = re.findall(r"between +all-gather ([0-9.]+) MB/s", first.output)
    assert 0.4 < float(between) < 1.2
    assert "times too slow. Take hybrid_shard if the model fits into one node" in first.output
