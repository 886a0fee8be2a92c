"""recipes/launch.slurm on a real two-node Slurm.

The tests cover a run up to its export, and what can interrupt or prevent a run.
"""

import re
import time

import pytest

from tests.slurm.conftest import NUM_STEPS, Job, wait_until

pytestmark = pytest.mark.slurm
PACED = {"SCRIPT": "tests/slurm/paced_sft.py", "PACE_SECONDS": "0.5"}
TIMEOUT_SECONDS = 10


def assert_resumed(job, undisturbed):
    """Check that a job has completed in two runs, with an undisturbed job's losses and export."""
    job.wait_until_state("COMPLETED")
    assert job.field("Restarts") == "1"
    assert 0 < int(re.search(r"resuming from \S+checkpoint-(\d+)", job.text()).group(1)) < NUM_STEPS
    assert job.losses() == undisturbed.losses()
    first, second = (
        each.run_directory / "export" / "model.safetensors" for each in (job, undisturbed)
    )
    assert first.read_bytes() == second.read_bytes()


def test_two_nodes_are_checked_train_and_export_a_model(undisturbed):
    from transformers import AutoModelForCausalLM

    checked, trained = undisturbed.text().split("preflight passed on node1, node2: ")
    assert re.search(r"on node\[1-2\]: 2 x 1 ranks, node1:[23]\d{4}, cpu, ", checked)
    assert "'loss'" in trained
    assert trained.rstrip().endswith("completed") and len(undisturbed.losses()) == NUM_STEPS
    AutoModelForCausalLM.from_pretrained(undisturbed.run_directory / "export")
    logs = undisturbed.output.parent / "logs" / undisturbed.id / "run0"
    assert all(list(logs.glob(f"{node}/**/stdout.log")) for node in ("node0", "node1"))


@pytest.mark.parametrize("grace_seconds", [20, 0])
def test_a_preempted_job_resumes_exactly_after_the_other_job(
    submit, undisturbed, cluster, grace_seconds
):
    cluster.run("scontrol", "update", "PartitionName=main", f"GraceTime={grace_seconds}")
    job = submit(**PACED)
    job.wait_for("'loss'")
    urgent = [
        "--parsable",
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 3",
    ]
    urgent_id = cluster.run("sbatch", *urgent).strip()
    assert_resumed(job, undisturbed)
    assert "COMPLETED" in cluster.run("scontrol", "show", "job", urgent_id)
    # A failure of the second run would not be taken for a preemption.
    assert job.field("PreemptTime") == "None"


def test_a_job_near_its_time_limit_saves_and_resumes_exactly(submit, undisturbed, cluster):
    job = submit(**PACED | {"PACE_SECONDS": "2"})
    job.wait_for("'loss'")
    minutes, seconds = map(int, job.field("RunTime").split(":")[1:])
    cluster.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes + 1 + (seconds > 0)}")
    job.wait_for("back in the queue")  # slurmctld looks every 30 s
    cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    assert_resumed(job, undisturbed)


def test_a_cancelled_job_is_not_requeued_and_leaves_no_process(submit, cluster):
    job = submit(**PACED)
    job.wait_for("'loss'")
    cluster.run("scancel", job.id)
    job.wait_until_state("CANCELLED", 30)
    wait_until(cluster.is_idle, 20, lambda: "two idle nodes")
    left = cluster.run("srun", "--nodes=2", "bash", "-c", "pgrep -fc [p]aced_sft || true")
    assert left.split() == ["0", "0"]


def test_a_failed_job_shows_the_error_and_is_not_requeued(submit):
    failed = submit("rank", **PACED, FAILING_RANK="1")
    rejected = submit("field", "--learning_rat", "1")
    for job, error in (
        (failed, r"\[rank1\]: ArithmeticError: failing rank"),
        (rejected, "RecipeError: "),
    ):
        job.wait_until_state("FAILED")
        assert job.field("ExitCode") == "1:0" and job.field("Restarts") == "0"
        assert re.search(rf"^{error}.*\n.*failed; ", job.text(), re.MULTILINE), job.text()


def test_a_job_killed_for_lack_of_memory_says_so_and_is_not_requeued_for_an_old_log(
    submit, tmp_path
):
    for directory in ("run0", "7/run0"):  # of earlier submissions with the same LOG_DIR
        old = tmp_path / "killed" / "logs" / directory / "stdout.log"
        old.parent.mkdir(parents=True)
        old.write_text("stopped by a signal; resume from runs/old/checkpoint-4\n")
    job = submit("killed", **PACED, KILLED_RANK="1")
    job.wait_until_state("FAILED")
    assert job.field("Restarts") == "0"
    assert "out of memory, it seems (exitcode: -9)" in job.text()


@pytest.mark.parametrize("options", [[], ["--gpus-per-node=1"]])
def test_a_job_whose_nodes_lack_accelerators_does_not_train_on_cpus(
    submit, cluster, tmp_path, options
):
    positional = ["2", "1", "4", "model", "tiny", "False"]
    job = Job(
        cluster,
        tmp_path / "job",
        positional,
        script="recipes/slurm/finetune.sh",
        options=options,
        TEMPLATE="full_shard",
        PREFLIGHT="1",
        ACCELERATE_USE_CPU="false",
    )
    job.wait_until_state("FAILED")
    assert "2 ranks need an accelerator each, and this node has 0. " in job.text()
    assert "'loss'" not in job.text() and job.field("Restarts") == "0"


def test_two_jobs_share_a_node_and_finetune_sh_takes_six_arguments(
    submit, cluster, tiny_model, text_file, tmp_path
):
    one = ("--nodes=1", "--nodelist=node1")
    first = submit("first", options=(*one, "--gpus-per-node=2"), NPROC_PER_NODE="")
    positional = ["2", "1", "4", tiny_model("llama"), "tiny", "False", "--max_length", "64"]
    positional += ["--output_dir", tmp_path / "second" / "run"]
    script = {"script": "recipes/slurm/finetune.sh", "DATASET": str(text_file)}
    second = Job(cluster, tmp_path / "second", positional, options=one, **script)
    ports = set()
    for job in (first, second):
        job.wait_until_state("COMPLETED")
        ports.add(re.search(r"1 x 2 ranks, node1:(\d+)", job.text()).group(1))
        assert (job.run_directory / "export" / "model.safetensors").is_file()
    assert len(ports) == 2
    assert not list(second.run_directory.glob("checkpoint-*"))  # because of save_model False


# Preflight between two nodes with networks of their own

BUSY = (
    "if [ $SLURM_NODEID = 0 ]; then python3 -m http.server $PORT >/dev/null 2>&1 & "
    'trap "kill $!" EXIT; sleep 2; fi; '
)
UNREACHABLE = "[ $SLURM_NODEID = 0 ] || ip rule add to 10.77.0.1 dport 21000 unreachable; "


@pytest.mark.parametrize(
    ("flags", "before", "problem"),
    [
        (
            "--num_machines 3 --num_processes 3",
            "",
            "machine_rank 2 did not join within 10 s; joined: node 0 (node1, pid ",
        ),
        ("--machine_rank 0", "", "main_process_ip node1 is not an address of this host"),
        ("--main_process_ip node2", "", "main_process_ip node2 is not an address of this host"),
        ("--main_process_ip 127.0.0.1", "", "A loopback address leads each host to itself"),
        ("--main_process_ip nod1", "", "main_process_ip 'nod1' does not resolve"),
        ("", BUSY, "main_process_port 21000 of node1 is in use"),
        ("", UNREACHABLE, "node 0 cannot be reached at node1"),
    ],
)
def test_preflight_names_a_wrong_setup_and_ends_in_time(cluster, flags, before, problem):
    command = (
        f"{before}hf-fsdp preflight --accelerate_config cpu --num_machines 2 "
        f"--machine_rank $SLURM_NODEID --timeout {TIMEOUT_SECONDS} --main_process_ip node1 "
        f"--main_process_port 21000 {flags}"
    )
    started = time.monotonic()
    try:
        done = cluster.client(
            "srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", command, PORT="21000"
        )
    finally:
        cluster.run("srun", "--nodes=2", "bash", "-c", "ip rule del to 10.77.0.1 dport 21000; true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert time.monotonic() - started < TIMEOUT_SECONDS + 60  # to import torch on a busy machine
    assert problem in done.stderr


def test_a_job_whose_output_directory_is_not_shared_does_not_train(submit, cluster, tmp_path):
    output = tmp_path / "job" / "run"
    output.mkdir(parents=True)
    cluster.run("srun", "--nodelist=node2", "mount", "-t", "tmpfs", "none", output)
    try:
        job = submit(PREFLIGHT="1")
        job.wait_until_state("FAILED")
    finally:
        cluster.run("srun", "--nodelist=node2", "umount", output)
    assert "does not see the files of node" in job.text() and "'loss'" not in job.text()
