"""recipes/launch.slurm on a real Slurm with two nodes, up to the export, and every event that can end a job."""

import re
import time

import pytest
import yaml

from tests.slurm.conftest import NUM_STEPS, Job, wait_until

pytestmark = pytest.mark.slurm
PACED = {"SCRIPT": "tests/slurm/paced_sft.py", "PACE_SECONDS": "0.5"}


def assert_went_on(job, whole, seconds=120):
    """The job is through, in two runs, with the losses of the run that nothing happened to."""
    job.wait_until_state("COMPLETED", seconds)
    assert job.field("Restarts") == "1"
    resumed_from = int(re.search(r"resume: from \S+checkpoint-(\d+)", job.text()).group(1))
    assert 0 < resumed_from < NUM_STEPS
    assert job.losses() == whole.losses()
    assert (job.run_directory / "export" / "model.safetensors").read_bytes() == (
        whole.run_directory / "export" / "model.safetensors"
    ).read_bytes()
    return resumed_from


def test_two_nodes_train_one_model_to_an_export_and_the_next_job_follows(whole, cluster):
    from transformers import AutoModelForCausalLM

    assert whole.field("JobState") == "COMPLETED", whole.text()
    assert re.search(r"on node\[1-2\]: 2 x 1 ranks, master node1:[23]\d{4},", whole.says())
    assert whole.says().endswith("completed")
    AutoModelForCausalLM.from_pretrained(whole.run_directory / "export")
    assert len(whole.losses()) == NUM_STEPS
    logs = {path.relative_to(whole.directory / "logs/run0").parts[0] for path in whole.directory.rglob("stdout.log")}
    assert logs == {"node0", "node1"}
    wait_until(lambda: "COMPLETED" in cluster.run("scontrol", "show", "job", whole.next_id), 20, "the job after it")


def test_run_near_its_time_limit_saves_and_resumes_after_a_requeue(submit, whole, cluster):
    job = submit(**PACED | {"PACE_SECONDS": "2"})
    job.wait_for("'loss'")
    minutes, seconds = map(int, job.field("RunTime").split(":")[1:])
    cluster.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes + 1 + (seconds > 0)}")
    job.wait_for("time limit: back in the queue", 60)  # slurmctld looks every 30 s
    cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    assert_went_on(job, whole)
    assert "restart 1 after: time limit" in job.says()


@pytest.mark.parametrize("grace_seconds", [20, 0])
def test_preempted_run_saves_and_resumes_after_the_other_job(submit, whole, cluster, grace_seconds):
    cluster.run("scontrol", "update", "PartitionName=main", f"GraceTime={grace_seconds}")
    job = submit(**PACED)
    job.wait_for("'loss'")
    urgent = ["--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"]
    urgent_id = cluster.run("sbatch", *urgent).strip()
    assert_went_on(job, whole)
    assert "restart 1 after: preemption" in job.says()
    assert "COMPLETED" in cluster.run("scontrol", "show", "job", urgent_id)


def test_crash_of_a_node_requeues_the_job_from_its_last_complete_checkpoint(submit, whole, cluster):
    job = submit(**PACED)
    wait_until(job.checkpoints, 90, job.text)
    assert cluster.script("crash", "node2").returncode == 0
    began, saved = time.monotonic(), job.checkpoints()[-1]
    try:
        wait_until(lambda: job.field("Restarts") == "1", 60, job.text)
        assert time.monotonic() - began < 60
    finally:
        assert cluster.script("boot", "node2").returncode == 0
    assert assert_went_on(job, whole) in (saved, saved + 4)  # one that was being written when the power went
    assert "restart 1 after: node failure" in job.says()


def test_canceled_run_is_not_requeued_and_leaves_no_process(submit, cluster):
    job = submit(**PACED)
    job.wait_for("'loss'")
    cluster.run("scancel", job.id)
    job.wait_until_state("CANCELLED", 30)
    assert "cancelled: Slurm ends the job" in job.says()
    wait_until(cluster.is_idle, 20, "two idle nodes")
    left = cluster.run("srun", "--nodes=2", "bash", "-c", "pgrep -fc [p]aced_sft || true")
    assert left.split() == ["0", "0"]


def test_failed_run_shows_the_first_rank_and_stops_the_jobs_after_it(submit, cluster):
    failed = submit("rank", **PACED, FAILING_RANK="1")
    refused = submit("argument", "--lr_scheduler_type", "none of these")
    then = ["--parsable", f"--dependency=afterok:{failed.id}", "--output=/dev/null", "--wrap=true"]
    next_id = cluster.run("sbatch", *then).strip()
    for job in (failed, refused):
        job.wait_until_state("FAILED", 90)
        assert job.field("ExitCode") == "1:0"
        assert job.field("Restarts") == "0"
    traceback = failed.text().split("the first traceback, from ")[1]
    assert "/node1/" in traceback.splitlines()[0]
    assert traceback.rstrip().endswith("ArithmeticError: rank of no use")
    assert re.search("errors found in .*\nRecipeError: .*none of these.*\n?$", refused.text())
    assert "Dependency" in cluster.run("scontrol", "show", "job", next_id)


def test_two_jobs_share_a_node_without_sharing_a_port(submit, recipe, cluster, tmp_path):
    one_node = ("--nodes=1", "--nodelist=node1")
    first = submit("first", options=(*one_node, "--gpus-per-node=2"))
    values = yaml.safe_load(recipe.read_text())
    model, rows = values["model_name_or_path"], values["dataset_name"]
    positional = ["2", "1", "4", model, "tiny", "False", "--max_length", "64", "--output_dir", tmp_path / "second/run"]
    second = Job(
        cluster, tmp_path / "second", positional, options=one_node, script="recipes/slurm/finetune.sh", DATASET=rows
    )
    wait_until(lambda: {"RUNNING"} == {first.field("JobState"), second.field("JobState")}, 60, "both running")
    ports = set()
    for job in (first, second):
        job.wait_until_state("COMPLETED", 120)
        ports.add(re.search(r"1 x 2 ranks, master node1:(\d+)", job.says()).group(1))
        assert (job.run_directory / "export" / "model.safetensors").is_file()
    assert len(ports) == 2
    assert first.checkpoints()
    assert not second.checkpoints()  # save_model False
