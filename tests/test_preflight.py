"""The preflight, run as the nodes of a job run it: what a healthy job shows, and what each sick one is told."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml
from torch.distributed import TCPStore

from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.configs import templates
from hf_fsdp_recipes.configs.strategy import read_sharding
from hf_fsdp_recipes.configs.validate import find_faults, read_config
from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import bandwidth_advice, devices, node_info
from tests.conftest import tiny_config
from tests.nodes import Node, finish, job, one_message, run, start
from tests.ranks.harness import free_port
from tests.recipes.launching import LAUNCH, ROOT, environment

SLACK_SECONDS = 12  # to start Python on a machine that has other things to do


# What a healthy job shows


def with_environment(number, nodes_of_job, **variables):
    nodes_of_job[number].environment = variables
    return nodes_of_job


def test_healthy_nodes_pass_with_one_table_and_leave_the_port_free(tmp_path, tiny_model):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model_name_or_path": str(tiny_model()), "max_steps": 10, "save_steps": 5}))
    template = ROOT / "accelerate_configs" / "fsdp2_full_shard.yaml"
    options = {"nproc_per_node": 2, "template": template, "config": recipe, "output_dir": tmp_path / "out"}
    port, before = free_port(), resource.getrusage(resource.RUSAGE_CHILDREN)
    first, second = run(*job(range(2), master_port=port, **options))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (first.status, second.status) == (0, 0), first.error
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30  # so it is on one core, with others
    lines = {line.split()[0]: line for line in first.output.splitlines()}
    assert all(f"node {number} (" in lines["nodes"] for number in range(2)) and second.output == ""
    assert "torch 2." in lines["software"] and "recipe.yaml" in lines["content"]
    assert "is shared and writable" in lines["output"] and "2 checkpoints of" in lines["space"]
    assert "GB/s within nodes (slowest: node" in lines["within"] and "GB/s between nodes" in lines["between"]
    assert lines["strategy"].split()[1] == "full_shard" and "passed" in lines["preflight"]
    assert list((tmp_path / "out").iterdir()) == []
    assert TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).port == port


def test_four_nodes_pass_and_a_wrong_clock_is_a_warning(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 7\n")
    first, *others = run(*with_environment(3, job(range(4)), PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert [outcome.status for outcome in (first, *others)] == [0] * 4, first.error
    assert "within" not in first.output and "between nodes" in first.output
    assert "warning: clocks differ by " in first.output
    assert "s: node 3 (" in first.output.split("warning: clocks differ by ")[1]


def launch(command, *, count=1, module_arguments=()):
    """Start launchers side by side; `command(number)` is each one's command line up to the module."""
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            [*command(number), "-m", "hf_fsdp_recipes.tools.preflight.preflight", *map(str, module_arguments)],
            env=environment(PYTHONPATH=str(ROOT)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    return finish(processes, started, 90)


def test_accelerate_launch_runs_it_on_two_nodes(tmp_path):
    template = tmp_path / "template.yaml"
    config = read_config(ROOT / "accelerate_configs" / "fsdp2_cpu.yaml") | {"num_machines": 2, "num_processes": 2}
    template.write_text(yaml.safe_dump(config))
    port = str(free_port())

    def command(number):
        address = ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--machine_rank", str(number)]
        return [*LAUNCH, "--config_file", str(template), *address]

    outcomes = launch(command, count=2, module_arguments=["--template", template])
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    output = "".join(outcome.output for outcome in outcomes)
    assert "between nodes" in output and output.count("passed") == 1


def test_launched_ranks_say_what_is_wrong_once_a_node():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (outcome,) = launch(lambda _: torchrun, module_arguments=["--output-dir", "/proc/nowhere"])
    assert outcome.status == 1
    assert outcome.error.count("PreflightError: ") == 1 and "/proc/nowhere cannot be written" in outcome.error


# Who did not come, or came twice


def test_missing_node_is_named_and_who_came():
    outcomes = run(*job([0, 2], count=3, timeout=3))
    message = one_message(outcomes)
    assert "1 of 3 nodes did not come within 3 s: 1; came: 0 (" in message and "2 (" in message
    assert max(outcome.seconds for outcome in outcomes) < 3 + SLACK_SECONDS


@pytest.mark.parametrize("numbers", [[0, 0], [0, 1, 1]])
def test_two_nodes_with_one_number_are_named_by_host_and_pid(numbers):
    outcomes = run(*job(numbers, timeout=40))
    message = one_message(outcomes)
    host = socket.gethostname()
    assert f"2 processes claim to be node {numbers[-1]}: {host}, pid " in message and "SLURM_NODEID" in message
    assert max(outcome.seconds for outcome in outcomes) < SLACK_SECONDS


def test_number_out_of_range_is_named():
    assert "node 7 (" in (message := one_message(run(*job([0, 7])))) and "Rule: 0 to 1" in message


def test_nodes_that_were_told_other_counts_are_named():
    first, _ = job([0, 1])
    port = first.arguments[5]
    _, second, _ = job([0, 1, 2], master_port=port)
    message = one_message(run(first, second))
    assert "node 1 (" in message and "was told of 3 nodes and node 0 of 2" in message


def test_node_that_is_killed_in_the_middle_is_named(tmp_path):
    os.mkfifo(tmp_path / "never_written")
    first, second = job([0, 1])
    first.arguments = [*first.arguments, "--template", ROOT / "accelerate_configs" / "fsdp2_cpu.yaml"]
    second.arguments = [*second.arguments, "--template", tmp_path / "never_written"]
    started = time.monotonic()
    processes = [start(first), start(second)]
    time.sleep(4)  # it hangs in reading its template, after the roll call
    processes[1].send_signal(signal.SIGKILL)
    outcome, _ = finish(processes, started, 30)
    assert outcome.status == 1 and outcome.seconds < 4 + SLACK_SECONDS
    assert f"pid {processes[1].pid}) left during comparing versions, code and files" in outcome.error


@pytest.mark.slow
def test_node_that_hangs_is_named_when_time_is_up(tmp_path):
    os.mkfifo(tmp_path / "never_written")
    first, second = job([0, 1], template=tmp_path / "never_written", timeout=5)
    first.arguments = [*first.arguments, "--template", ROOT / "accelerate_configs" / "fsdp2_cpu.yaml"]
    started = time.monotonic()
    processes = [start(first), start(second)]
    (outcome,) = finish(processes[:1], started, 90)
    processes[1].kill()
    processes[1].communicate()
    assert outcome.status == 1 and 30 < outcome.seconds < 30 + SLACK_SECONDS
    assert f"pid {processes[1].pid}) was silent in comparing versions, code and files" in outcome.error


# The master's address and port


def test_name_that_does_not_resolve_is_named():
    outcomes = run(*job([0, 1], master_addr="no-such-host.invalid", timeout=3))
    for number, outcome in enumerate(outcomes):
        assert outcome.status == 1 and f"node {number} (" in outcome.error
        assert "'no-such-host.invalid' does not resolve" in outcome.error
        assert outcome.seconds < 3 + SLACK_SECONDS


def test_nobody_listening_is_said():
    (outcome,) = run(*job([1], count=2, timeout=3))
    assert outcome.status == 1 and outcome.seconds < 3 + SLACK_SECONDS
    assert "node 1 (" in outcome.error and "nobody of this job listens at 127.0.0.1 port" in outcome.error


def test_master_address_of_another_host_is_said():
    (outcome,) = run(*job([0], count=2, master_addr="198.51.100.1", timeout=3))  # RFC 5737: nobody's
    assert outcome.status == 1 and outcome.seconds < 3 + SLACK_SECONDS
    assert "198.51.100.1 is not an address of this host" in outcome.error


def test_loopback_master_is_the_reason_given_where_nodes_are_missing():
    message = one_message(run(*job([0], count=2, master_addr="localhost", timeout=3)))
    assert "master address localhost is loopback" in message


def test_port_that_is_taken_names_who_holds_it():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        outcomes = run(*job([0, 1], master_port=server.getsockname()[1], timeout=20))
    for number, outcome in enumerate(outcomes):
        assert outcome.status == 1 and outcome.seconds < SLACK_SECONDS
        assert f"node {number} (" in outcome.error and "is taken by pid " in outcome.error
        assert "pytest" in outcome.error


def test_two_jobs_on_one_port_are_told_apart():
    first = job([0], count=2, timeout=8)[0]
    second = job([0], count=2, timeout=8, master_port=first.arguments[5])[0]
    first.environment, second.environment = {"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "18"}
    errors = [outcome.error for outcome in run(first, second)]
    (stranger,) = [error for error in errors if "is taken by the preflight of job 1" in error]
    assert ("job 17" in stranger) and ("job 18" in stranger)
    assert sum("1 of 2 nodes did not come" in error for error in errors) == 1


# What differs between nodes


def test_other_package_version_is_named(tmp_path):
    information = tmp_path / "transformers-9.9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    message = one_message(run(*with_environment(1, job([0, 1, 2]), PYTHONPATH=f"{tmp_path}:{ROOT}")))
    assert "transformers differs: " in message and "9.9.9 on node 1 (" in message
    assert message.count("differs") == 1


def test_other_code_is_named(tmp_path):
    shutil.copytree(ROOT / "hf_fsdp_recipes", tmp_path / "hf_fsdp_recipes")
    with (tmp_path / "hf_fsdp_recipes" / "ranks.py").open("a") as stream:
        stream.write("# changed\n")
    nodes_of_job = with_environment(1, job([0, 1]), PYTHONPATH=str(tmp_path))
    nodes_of_job[1].directory = tmp_path
    assert "the code of hf_fsdp_recipes differs: " in one_message(run(*nodes_of_job))


def test_other_recipe_under_the_same_name_is_named(tmp_path):
    nodes_of_job = job([0, 1], config="recipe.yaml")
    for number, node in enumerate(nodes_of_job):
        node.directory = tmp_path / str(number)
        node.directory.mkdir()
        (node.directory / "recipe.yaml").write_text(f"max_steps: {number}\n")
    assert "the content of recipe.yaml differs: " in one_message(run(*nodes_of_job))


def test_recipe_that_one_node_lacks_is_named(tmp_path):
    nodes_of_job = job([0, 1], config="recipe.yaml")
    nodes_of_job[0].directory, nodes_of_job[1].directory = tmp_path, tmp_path.parent
    (tmp_path / "recipe.yaml").write_text("max_steps: 1\n")
    message = one_message(run(*nodes_of_job))
    assert message.startswith("PreflightError: node 1 (") and "recipe.yaml cannot be read" in message


# The output directory


def test_unshared_directory_says_who_does_not_see_whom(tmp_path):
    nodes_of_job = job([0, 1], output_dir="runs")
    for number, node in enumerate(nodes_of_job):
        node.directory = tmp_path / str(number)
        node.directory.mkdir()
    outcomes = run(*nodes_of_job)
    message = one_message(outcomes)
    assert "output directory runs is not shared: node 0 (" in message and "does not see the file of node 1 (" in message
    assert [list((tmp_path / str(number) / "runs").iterdir()) for number in range(2)] == [[], []]
    assert max(outcome.seconds for outcome in outcomes) < 5 + SLACK_SECONDS


def test_directory_that_one_node_cannot_write_names_that_node(tmp_path):
    nodes_of_job = job([0, 1], output_dir="runs")
    for number, node in enumerate(nodes_of_job):
        node.directory = tmp_path / str(number)
        node.directory.mkdir()
    (tmp_path / "1" / "runs").write_text("a file\n")
    message = one_message(run(*nodes_of_job))
    assert message.startswith("PreflightError: node 1 (") and "runs cannot be written (File exists)" in message


def test_run_that_does_not_fit_is_refused(tmp_path):
    config = tiny_config("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 1 << 17, 1 << 19, 1 << 15
    config.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path)}))
    message = one_message(run(*job([0, 1], config=recipe)))
    assert f"{tmp_path} has no room for the run: it writes at least " in message and "save_total_limit" in message


# What a job writes


@pytest.mark.parametrize(
    ("recipe", "checkpoints"),
    [
        ({"save_total_limit": 3}, 4),
        ({"save_total_limit": 3, "max_steps": 20, "save_steps": 10}, 2),
        ({"max_steps": 25, "save_steps": 10}, 3),
        ({"save_strategy": "epoch", "num_train_epochs": 2}, 2),
        ({"save_steps": 0.25}, 4),
        ({"save_strategy": "no"}, 1),
    ],
)
def test_checkpoints_that_lie_there_at_once_are_counted(tiny_model, recipe, checkpoints):
    directory = tiny_model()
    need = disk_estimate.estimate({"model_name_or_path": str(directory)} | recipe)
    weights_bytes = (directory / "model.safetensors").stat().st_size
    assert need.num_checkpoints == checkpoints and not need.is_open_ended
    assert need.export_bytes == pytest.approx(weights_bytes, rel=0.1)
    assert need.checkpoint_bytes == 3 * need.export_bytes


def test_lora_writes_adapters_alone(tiny_model):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directory = tiny_model()
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(directory), LoraConfig(r=4, target_modules="all-linear")
    )
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    need = disk_estimate.estimate({"model_name_or_path": str(directory), "use_peft": True, "lora_r": 4})
    assert need.export_bytes == 4 * trained and need.checkpoint_bytes == 12 * trained


# Devices, limits and advice, from facts


def device(kind="cuda", count=8, total=80, free=79):
    return {
        "kind": kind,
        "count": count,
        "name": f"{kind} {total}",
        "total_bytes": total << 30,
        "free_bytes": free << 30,
    }


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        ([device("cpu", 0, 0, 0)] * 8, "the kind of devices differs: cuda on node 0; cpu on node 1"),
        ([device(count=4)] * 8, "node 1 has 4 cuda devices for 8 ranks"),
        ([device(total=40, free=40)] * 8, "device memory differs: device 0 of node 1 (cuda 40) has 42.9 GB"),
        ([device()] * 3 + [device(free=2)] + [device()] * 4, "device 3 of node 1 is busy: 2.1 of 85.9 GB free"),
    ],
)
def test_devices_that_do_not_fit_together_are_named(second, fault):
    with pytest.raises(PreflightError, match="Rule: ") as raised:
        devices.check([[device()] * 8, second], ["node 0", "node 1"], 8)
    assert fault in str(raised.value)


def test_alike_devices_pass_and_a_half_busy_one_is_a_warning():
    found = [[device()] * 8, [device(free=60)] + [device()] * 7]
    devices.check(found, ["node 0", "node 1"], 8)
    assert "device 0 of node 1" in devices.describe(found, ["node 0", "node 1"])[1]


def test_low_limits_are_warnings():
    good = {
        "unix_seconds": 0.0,
        "shm_bytes": 8 << 30,
        "open_files": 65536,
        "is_memlock_limited": False,
        "has_infiniband": True,
    }
    low = good | {"shm_bytes": 64 << 20, "open_files": 256, "is_memlock_limited": True}
    names = ["node 0", "node 1"]
    assert node_info.find_warnings([good, good], names, 16) == []
    warnings = node_info.find_warnings([good, low], names, 16)
    assert len(warnings) == 3 and all(warning.startswith("node 1: ") for warning in warnings)


@pytest.mark.parametrize("template", templates.all_templates(), ids=lambda template: template.name)
def test_strategy_is_read_from_every_template(template):
    config = yaml.safe_load(templates.render(template))
    assert read_sharding(config) == template.strategy


H100 = bandwidth_advice.Load(tokens=8192, tokens_source="the recipe", flops_per_second=600e12, item_bytes=2)


def test_slow_wire_between_nodes_advises_hybrid():
    text = bandwidth_advice.advise("full_shard", H100, within=300e9, between=10e9, num_nodes=2, ranks_per_node=8)
    assert "needs 73.24 GB/s between nodes" in text and "7.3 times too slow. Take hybrid_shard" in text


def test_fast_wire_is_enough_and_hybrid_is_judged_by_what_stays_inside():
    assert bandwidth_advice.advise("full_shard", H100, 300e9, 200e9, 2, 8).endswith(": enough")
    assert "within nodes" in (
        text := bandwidth_advice.advise("hybrid_shard", H100, 300e9, 10e9, 2, 8)
    ) and text.endswith("enough")


def test_hybrid_is_not_advised_where_a_node_is_no_faster_inside():
    assert "hybrid" not in bandwidth_advice.advise(
        "full_shard", H100, within=9e9, between=10e9, num_nodes=2, ranks_per_node=8
    )


def test_counts_are_those_of_the_launch_and_not_the_templates():
    template = templates.find_template("fsdp2_hybrid_shard")
    launched = bandwidth_advice.as_launched(yaml.safe_load(templates.render(template)), num_nodes=3, ranks_per_node=4)
    assert find_faults(launched) == []


def test_preflight_starts_without_torch():
    code = "import sys, hf_fsdp_recipes.cli; print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_incomplete_flags_are_named():
    (outcome,) = run(Node(["--num-nodes", 2]))
    assert outcome.status == 1 and "--num-nodes 2 without --node-rank and --master-addr" in outcome.error
