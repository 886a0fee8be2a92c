"""The preflight, run as the nodes of a job run it: the output of a working job, and the error for each broken one."""

import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from torch.distributed import TCPStore
from typer.testing import CliRunner

from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.cli import app
from hf_fsdp_recipes.configs import templates
from hf_fsdp_recipes.configs.strategy import read_sharding
from hf_fsdp_recipes.configs.validate import find_faults, read_config
from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import bandwidth_advice, devices, node_info
from hf_fsdp_recipes.tools.preflight.preflight import MIN_CHECK_SECONDS
from hf_fsdp_recipes.tools.preflight.rendezvous import ParticipantInfo, Rendezvous
from tests.conftest import tiny_config
from tests.ranks.harness import free_port
from tests.recipes.launching import LAUNCH, ROOT, environment
from tests.tools.nodes import PREFLIGHT, common_error, finish, make_nodes, run, start

SLACK_SECONDS = 45  # to start Python and import torch on a busy machine
JOIN_SECONDS = 20  # more than enough for nodes that are threads of this process


# Healthy jobs


def with_environment(node_rank, nodes, **variables):
    nodes[node_rank].environment = variables
    return nodes


def test_healthy_nodes_pass_with_one_table_and_leave_the_port_free(tmp_path, tiny_model):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model_name_or_path": str(tiny_model()), "max_steps": 10, "save_steps": 5}))
    template = ROOT / "accelerate_configs" / "fsdp2_full_shard.yaml"
    options = {"nproc_per_node": 2, "template": template, "config": recipe, "output_dir": tmp_path / "out"}
    port, before = free_port(), resource.getrusage(resource.RUSAGE_CHILDREN)
    first, second = run(*make_nodes(range(2), master_port=port, **options))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (first.status, second.status) == (0, 0), first.error
    # This took about 12 s of CPU time; a slow machine that had to compile the modules first took 42 s.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 120
    lines = {line.split()[0]: line for line in first.output.splitlines()}
    assert all(f"node {node_rank} (" in lines["nodes"] for node_rank in range(2))
    assert second.output == ""
    assert "torch 2." in lines["software"]
    assert "recipe.yaml" in lines["content"]
    assert "is shared and writable" in lines["output"]
    assert "2 checkpoints of" in lines["space"]
    assert "GB/s within nodes (slowest: node" in lines["within"].replace("MB/s", "GB/s")
    assert "GB/s between nodes" in lines["between"].replace("MB/s", "GB/s")
    assert lines["strategy"].split()[1] == "full_shard"
    assert "passed" in lines["preflight"]
    assert list((tmp_path / "out").iterdir()) == []
    assert TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).port == port


@pytest.mark.slow
def test_four_nodes_pass_and_a_wrong_clock_is_a_warning(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 7\n")
    first, *others = run(*with_environment(3, make_nodes(range(4)), PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert [result.status for result in (first, *others)] == [0] * 4, first.error
    assert "within" not in first.output
    assert "between nodes" in first.output
    assert "s: node 3 (" in first.output.split("warning: clocks differ by ")[1]


def launch(command, *, num_launchers=1, arguments=()):
    """Start launchers in parallel; `command(node_rank)` is a launcher's command line up to the program."""
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            [*command(node_rank), *PREFLIGHT, *map(str, arguments)],
            env=environment(PYTHONPATH=str(ROOT)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node_rank in range(num_launchers)
    ]
    return finish(processes, started, 200)


@pytest.mark.slow
def test_accelerate_launch_runs_it_on_two_nodes(tmp_path):
    template = tmp_path / "template.yaml"
    config = read_config(ROOT / "accelerate_configs" / "fsdp2_cpu.yaml") | {"num_machines": 2, "num_processes": 4}
    template.write_text(yaml.safe_dump(config))
    port = str(free_port())

    def command(node_rank):
        address = ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--machine_rank", str(node_rank)]
        return [*LAUNCH, "--config_file", str(template), *address, "--no_python"]

    results = launch(command, num_launchers=2, arguments=["--template", template, "--timeout", "120"])
    assert [result.status for result in results] == [0, 0], results
    output = "".join(result.output for result in results)
    assert "within nodes" in output
    assert "between nodes" in output
    assert output.count("passed") == 1


@pytest.mark.slow
def test_launched_ranks_print_an_error_once_per_node():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    (result,) = launch(lambda _: torchrun, arguments=["--output-dir", "/proc/nowhere"])
    assert result.status == 1
    assert result.error.count("PreflightError: ") == 1
    assert "/proc/nowhere cannot be written" in result.error


# Missing and duplicated nodes


def test_missing_node_is_named_with_those_that_joined():
    port = free_port()
    infos = [describe_node(node_rank, 3, port, host="hosta", pid=node_rank) for node_rank in (0, 2)]
    first, second = join_together(*infos, timeout_seconds=3)
    assert first == second
    assert first.startswith("1 of 3 nodes did not join within 3 s: 1; joined: ")
    assert "0 (hosta, pid 0)" in first and "2 (hosta, pid 2)" in first


def test_two_nodes_with_rank_0_are_named_by_host_and_pid():
    port = free_port()
    first, second = join_together(*(describe_node(0, 2, port, host=f"host{n}", pid=n) for n in range(2)))
    assert first == second
    assert first.startswith("2 processes claim to be node 0: host0, pid 0 and host1, pid 1.")
    assert "SLURM_NODEID" in first


def describe_node(node_rank, num_nodes, port, **options):
    return ParticipantInfo(node_rank, num_nodes, 1, "127.0.0.1", port, **options)


def join(info, timeout_seconds=JOIN_SECONDS):
    """Return a node's rendezvous once all have joined, or its error."""
    try:
        rendezvous = Rendezvous(info, timeout_seconds)
    except PreflightError as error:
        return str(error)
    try:
        rendezvous.check_membership()
    except PreflightError as error:
        rendezvous.close()
        return str(error)
    return rendezvous


def join_together(*infos, timeout_seconds=JOIN_SECONDS):
    """Join as several nodes, one per thread of this process."""
    with ThreadPoolExecutor(len(infos)) as executor:
        return list(executor.map(join, infos, [timeout_seconds] * len(infos)))


@pytest.mark.parametrize(
    ("second", "third", "error"),
    [
        ((1, 3), (1, 3), "2 processes claim to be node 1: hosta, pid 7 and hostb, pid 8."),
        ((1, 3), (7, 3), "node 7 (hostb, pid 8) is out of range: --node-rank must be between 0 and 2."),
        ((1, 4), (2, 3), "node 1 (hosta, pid 7) was started with --num-nodes 4, node 0 with 3; they must match."),
    ],
)
def test_nodes_started_with_wrong_numbers_are_named_on_all(second, third, error):
    port = free_port()
    infos = [describe_node(0, 3, port), describe_node(*second, port, host="hosta", pid=7)]
    errors = join_together(*infos, describe_node(*third, port, host="hostb", pid=8))
    assert len(set(errors)) == 1
    assert errors[0].startswith(error)


def test_node_that_stops_responding_is_named_on_all_others():
    port = free_port()
    leader, second, silent = join_together(*(describe_node(node_rank, 3, port) for node_rank in range(3)))
    for rendezvous in (leader, second):
        rendezvous.extend_deadline(0.5)

    def run_stage(rendezvous):
        with pytest.raises(PreflightError) as raised:
            rendezvous.run_stage("testing", lambda: 0, lambda values: values)
        return str(raised.value)

    with ThreadPoolExecutor(2) as executor:
        assert set(executor.map(run_stage, (leader, second))) == {
            f"{silent.info} did not respond while testing; see the log there."
        }


def test_failure_of_one_node_does_not_wait_for_the_deadline():
    port = free_port()
    leader, failing, silent = join_together(*(describe_node(node_rank, 3, port) for node_rank in range(3)))
    started = time.monotonic()

    def run_stage(rendezvous):
        with pytest.raises(PreflightError, match=r"^node 1 \(.*: ZeroDivisionError: .* by zero\.$"):
            rendezvous.run_stage("testing", lambda: 1 // (rendezvous is leader), lambda values: values)

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(run_stage, (leader, failing)))
    assert time.monotonic() - started < JOIN_SECONDS / 2
    assert silent.has_failed("testing")


def test_exit_of_node_0_does_not_hang_the_others():
    port = free_port()
    leader, member = join_together(describe_node(0, 2, port), describe_node(1, 2, port))
    name = str(leader.info)
    del leader
    with pytest.raises(PreflightError) as raised:
        member.run_stage("testing", lambda: 0, lambda values: values)
    assert str(raised.value) == f"{name} exited while testing; see its log."


def test_node_that_joins_late_is_refused():
    port = free_port()
    leader, member = join_together(describe_node(0, 2, port), describe_node(1, 2, port))
    assert "joined after all 2 nodes had" in join(describe_node(1, 2, port))
    assert leader.names == member.names


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_node_that_dies_or_hangs_is_named_when_time_is_up(tmp_path, is_killed):
    fifo = tmp_path / "never_written"
    os.mkfifo(fifo)
    first, second = make_nodes([0, 1], timeout=MIN_CHECK_SECONDS)
    first.arguments = [*first.arguments, "--template", ROOT / "accelerate_configs" / "fsdp2_cpu.yaml"]
    second.arguments = [*second.arguments, "--template", fifo]
    started = time.monotonic()
    processes = [start(first), start(second)]
    writer = wait_for_reader(fifo)
    hung = time.monotonic()
    if is_killed:
        processes[1].send_signal(signal.SIGKILL)
    (result,) = finish(processes[:1], started, 90)
    processes[1].kill()
    processes[1].communicate()
    os.close(writer)
    assert result.status == 1
    assert time.monotonic() - hung < MIN_CHECK_SECONDS + SLACK_SECONDS
    assert f"pid {processes[1].pid}) did not respond while comparing versions, code and files" in result.error


def wait_for_reader(fifo):
    """Return a descriptor for writing once a process has opened the fifo; that process hangs until it is closed."""
    deadline = time.monotonic() + SLACK_SECONDS
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO
            assert time.monotonic() < deadline, "no process has opened the fifo"
            time.sleep(0.1)


# The master's address and port


def test_name_that_does_not_resolve_is_named():
    port = free_port()
    infos = [ParticipantInfo(node_rank, 2, 1, "no-such-host.invalid", port) for node_rank in range(2)]
    for info, error in zip(infos, join_together(*infos, timeout_seconds=1), strict=True):
        assert error.startswith(f"{info}: ")
        assert "'no-such-host.invalid' does not resolve" in error


def test_missing_node_0_is_reported():
    error = join(describe_node(1, 2, free_port(), host="hosta", pid=7), timeout_seconds=1)
    assert error.startswith("node 1 (hosta, pid 7): ")
    assert "no preflight is listening at 127.0.0.1 port" in error


@pytest.mark.slow
def test_master_address_of_another_host_is_reported():
    (result,) = run(*make_nodes([0], num_nodes=2, master_addr="198.51.100.1", timeout=3))  # reserved by RFC 5737
    assert result.status == 1
    assert result.seconds < 3 + SLACK_SECONDS
    assert "198.51.100.1 is not an address of this host" in result.error


@pytest.mark.slow
def test_loopback_master_is_the_reason_for_missing_nodes():
    message = common_error(run(*make_nodes([0], num_nodes=2, master_addr="localhost", timeout=3)))
    assert "Master address localhost is loopback" in message


@pytest.mark.slow
def test_port_in_use_names_the_process_that_holds_it():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        results = run(*make_nodes([0, 1], master_port=server.getsockname()[1]))
    for node_rank, result in enumerate(results):
        assert result.status == 1
        assert result.seconds < SLACK_SECONDS
        assert f"node {node_rank} (" in result.error
        assert "is in use by pid " in result.error
        assert "pytest" in result.error


def test_store_of_another_program_is_a_port_in_use():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert f"port {store.port} of 127.0.0.1 is in use by pid {os.getpid()} of " in join(describe_node(1, 2, store.port))


def test_two_jobs_on_one_port_are_kept_apart():
    port = free_port()
    leader = Rendezvous(describe_node(0, 2, port, host="hosta", pid=7, slurm_job_id="17"), JOIN_SECONDS)
    error = join(describe_node(0, 2, port, slurm_job_id="18"))
    assert "is in use by the preflight of Slurm job 17 (hosta, pid 7); this is job 18." in error
    assert leader.store.add("num_joined", 0) == 0


# Differences between nodes


@pytest.mark.slow
def test_different_package_version_is_named(tmp_path):
    information = tmp_path / "transformers-9.9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    message = common_error(run(*with_environment(1, make_nodes([0, 1, 2]), PYTHONPATH=f"{tmp_path}:{ROOT}")))
    assert "transformers differs: " in message
    assert "9.9.9 on node 1 (" in message
    assert message.count("differs") == 1


@pytest.mark.slow
def test_different_code_is_named(tmp_path):
    shutil.copytree(ROOT / "hf_fsdp_recipes", tmp_path / "hf_fsdp_recipes")
    with (tmp_path / "hf_fsdp_recipes" / "errors.py").open("a") as stream:
        stream.write("# changed\n")
    nodes = with_environment(1, make_nodes([0, 1]), PYTHONPATH=str(tmp_path))
    nodes[1].directory = tmp_path
    assert "the code of hf_fsdp_recipes differs: " in common_error(run(*nodes))


def make_nodes_in_own_directories(tmp_path, **options):
    nodes = make_nodes([0, 1], **options)
    for node_rank, node in enumerate(nodes):
        node.directory = tmp_path / str(node_rank)
        node.directory.mkdir()
    return nodes


@pytest.mark.slow
def test_different_recipe_of_the_same_name_is_named(tmp_path):
    nodes = make_nodes_in_own_directories(tmp_path, config="recipe.yaml")
    for node_rank, node in enumerate(nodes):
        (node.directory / "recipe.yaml").write_text(f"max_steps: {node_rank}\n")
    assert "the content of recipe.yaml differs: " in common_error(run(*nodes))


@pytest.mark.parametrize(
    ("option", "name", "node_with_a_file", "reason"),
    [
        ("config", "recipe.yaml", 0, "is neither a file nor a shipped recipe"),
        pytest.param("output_dir", "runs", 1, "cannot be written (File exists)", marks=pytest.mark.slow),
    ],
)
def test_node_without_the_recipe_or_the_output_directory_is_named(tmp_path, option, name, node_with_a_file, reason):
    nodes = make_nodes_in_own_directories(tmp_path, **{option: name})
    (tmp_path / str(node_with_a_file) / name).write_text("max_steps: 1\n")
    message = common_error(run(*nodes))
    assert message.startswith("PreflightError: node 1 (")
    assert f"{name} {reason}" in message


def node_facts(driver="570.86.15", **variables):
    return {
        "versions": {"driver": driver},
        "nccl_variables": variables,
        "code_hash": "c0de",
        "file_hashes": {"recipe.yaml": "c0ffee"},
    }


def test_node_with_another_driver_nccl_variable_or_recipe_is_named():
    names = ["node 0", "node 1", "node 2", "node 3"]
    usual = node_facts(NCCL_IB_DISABLE="1")
    node_info.check_same([usual] * 4, names)
    with pytest.raises(PreflightError) as raised:
        node_info.check_same([usual, usual, node_facts("550.54.14", NCCL_IB_DISABLE="1"), usual], names)
    assert str(raised.value) == (
        "driver differs: 570.86.15 on node 0, node 1, node 3; 550.54.14 on node 2. Install the same versions on every node."
    )
    with pytest.raises(PreflightError, match="NCCL_IB_DISABLE differs: 1 on node 0, node 1, node 2; unset on node 3"):
        node_info.check_same([usual, usual, usual, node_facts()], names)
    with pytest.raises(
        PreflightError, match=r"the content of recipe.yaml differs: c0ffee on node 0, .*; beef on node 2\."
    ):
        node_info.check_same([usual, usual, usual | {"file_hashes": {"runs/recipe.yaml": "beef"}}, usual], names)


def test_variables_that_describe_one_node_are_not_compared(tmp_path, monkeypatch):
    (tmp_path / "version").write_text("570.86.15\n")
    monkeypatch.setattr(node_info, "DRIVER_VERSION_FILES", (tmp_path / "none", tmp_path / "version"))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    found = node_info.collect([], num_ranks=2)
    assert found["nccl_variables"] == {"NCCL_ALGO": "Ring"}
    assert found["versions"]["driver"] == "570.86.15"


# The output directory


@pytest.mark.slow
def test_unshared_directory_names_the_nodes_that_do_not_see_each_other(tmp_path):
    results = run(*make_nodes_in_own_directories(tmp_path, output_dir="runs"))
    message = common_error(results)
    assert "output directory runs is not shared: node 0 (" in message
    assert "does not see the file of node 1 (" in message
    assert [list((tmp_path / str(node_rank) / "runs").iterdir()) for node_rank in range(2)] == [[], []]
    assert max(result.seconds for result in results) < 5 + SLACK_SECONDS


@pytest.mark.slow
def test_run_that_does_not_fit_on_the_disk_is_refused(tmp_path):
    config = tiny_config("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 1 << 17, 1 << 19, 1 << 15
    config.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path)}))
    message = common_error(run(*make_nodes([0, 1], config=recipe)))
    assert f"{tmp_path} has " in message
    assert "but the run writes at least " in message
    assert "save_total_limit" in message


# Disk estimates


@pytest.mark.parametrize(
    ("recipe", "num_checkpoints"),
    [
        ({"save_total_limit": 3}, 4),
        ({"save_total_limit": 3, "max_steps": 20, "save_steps": 10}, 2),
        ({"max_steps": 25, "save_steps": 10}, 3),
        ({"save_strategy": "epoch", "num_train_epochs": 2}, 2),
        ({"save_steps": 0.25}, 4),
        ({"save_strategy": "no"}, 1),
    ],
)
def test_checkpoints_on_disk_at_once_are_counted(tiny_model, recipe, num_checkpoints):
    directory = tiny_model()
    estimate = disk_estimate.estimate({"model_name_or_path": str(directory)} | recipe)
    weights_bytes = (directory / "model.safetensors").stat().st_size
    assert estimate.num_checkpoints == num_checkpoints
    assert not estimate.is_lower_bound
    assert estimate.export_bytes == pytest.approx(weights_bytes, rel=0.1)
    assert estimate.checkpoint_bytes == 3 * estimate.export_bytes


def test_lora_writes_only_adapters(tiny_model):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directory = tiny_model()
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(directory), LoraConfig(r=4, target_modules="all-linear")
    )
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    estimate = disk_estimate.estimate({"model_name_or_path": str(directory), "use_peft": True, "lora_r": 4})
    assert estimate.export_bytes == 4 * num_trained
    assert estimate.checkpoint_bytes == 12 * num_trained


# Devices, limits and advice, from made-up facts


def device(kind="cuda", count=8, total=80, free=79):
    return {
        "kind": kind,
        "count": count,
        "name": f"{kind} {total}",
        "total_bytes": total << 30,
        "free_bytes": free << 30,
    }


@pytest.mark.parametrize(
    ("second", "error"),
    [
        ([device("cpu", 0, 0, 0)] * 8, "the type of devices differs: cuda on node 0; cpu on node 1"),
        ([device(count=4)] * 8, "node 1 has 4 cuda devices for 8 ranks"),
        ([device(total=40, free=40)] * 8, "device memory differs: device 0 of node 1 (cuda 40) has 42.9 GB"),
        ([device()] * 3 + [device(free=2)] + [device()] * 4, "device 3 of node 1 is busy: 2.1 of 85.9 GB free"),
    ],
)
def test_mismatched_devices_are_named(second, error):
    with pytest.raises(PreflightError) as raised:
        devices.check_devices([[device()] * 8, second], ["node 0", "node 1"], 8)
    assert error in str(raised.value)


def test_matching_devices_pass_and_a_partly_used_one_is_a_warning():
    found = [[device()] * 8, [device(free=60)] + [device()] * 7]
    _, (label, text) = devices.check_devices(found, ["node 0", "node 1"], 8)
    assert label == "warning"
    assert "device 0 of node 1" in text


def test_low_limits_are_warnings(tmp_path, monkeypatch):
    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(node_info, "_INFINIBAND", tmp_path)
    found = []
    for shm_bytes, limit in ((8 << 30, resource.RLIM_INFINITY), (64 << 20, 256)):
        monkeypatch.setattr(
            node_info.shutil, "disk_usage", lambda _, size=shm_bytes: shutil._ntuple_diskusage(size, 0, 0)
        )
        monkeypatch.setattr(node_info.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        found.append({"unix_seconds": 0.0, "low_limits": node_info.find_low_limits(num_ranks=16)})
    good, low = found
    names = ["node 0", "node 1", "node 2"]
    assert node_info.find_warnings([good] * 3, names) == []
    warnings = node_info.find_warnings([good, low, low], names)
    assert len(warnings) == 3
    assert all(warning.startswith("node 1, node 2: ") for warning in warnings)


@pytest.mark.parametrize("template", templates.all_templates(), ids=lambda template: template.name)
def test_strategy_is_read_from_every_template(template):
    config = yaml.safe_load(templates.render(template))
    assert read_sharding(config) == template.strategy


H100 = bandwidth_advice.RankLoad(
    num_tokens=8192, tokens_source="the recipe", flops_per_second=600e12, parameter_bytes=2
)


def test_slow_network_between_nodes_advises_hybrid():
    text = bandwidth_advice.advise("full_shard", H100, within=300e9, between=10e9, num_nodes=2, ranks_per_node=8)
    assert "needs 97.66 GB/s between nodes" in text
    assert "9.8 times too slow. Use hybrid_shard" in text


def test_fast_network_is_sufficient_and_hybrid_is_compared_with_the_links_within_nodes():
    assert bandwidth_advice.advise("full_shard", H100, 300e9, 200e9, 2, 8).endswith(": sufficient")
    text = bandwidth_advice.advise("hybrid_shard", H100, 300e9, 10e9, 2, 8)
    assert "within nodes" in text
    assert text.endswith(": sufficient")


def test_hybrid_is_not_advised_if_links_within_a_node_are_no_faster():
    assert "hybrid" not in bandwidth_advice.advise(
        "full_shard", H100, within=9e9, between=10e9, num_nodes=2, ranks_per_node=8
    )


def test_template_is_checked_with_the_counts_of_the_launch():
    template = templates.find_template("fsdp2_hybrid_shard")
    config = yaml.safe_load(templates.render(template))
    assert find_faults(bandwidth_advice.apply_launch_counts(config, num_nodes=3, ranks_per_node=4)) == []


def test_incomplete_launcher_variables_are_named():
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    error = CliRunner(env=variables).invoke(app, ["preflight"]).exception
    assert isinstance(error, PreflightError) and "WORLD_SIZE is set but LOCAL_RANK is not" in str(error)


def test_incomplete_flags_are_named():
    error = CliRunner().invoke(app, ["preflight", "--num-nodes", "2"]).exception
    assert isinstance(error, PreflightError)
    assert "--num-nodes 2 also needs --node-rank and --master-addr" in str(error)
