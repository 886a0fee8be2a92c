"""recipes/launch.slurm on a real two-node Slurm: a run up to its export, and everything that can interrupt a run."""

import re
import time

import pytest
import yaml

from tests.slurm.conftest import NUM_STEPS, Job, wait_until

pytestmark = pytest.mark.slurm
PACED = {"SCRIPT": "tests/slurm/paced_sft.py", "PACE_SECONDS": "0.5"}


def assert_resumed(job, undisturbed, seconds=120):
    """Check that a job completed in two runs with the same losses and export as an undisturbed job."""
    job.wait_until_state("COMPLETED", seconds)
    assert job.field("Restarts") == "1"
    resumed_from = int(re.search(r"resume: from \S+checkpoint-(\d+)", job.text()).group(1))
    assert 0 < resumed_from < NUM_STEPS
    assert job.losses() == undisturbed.losses()
    assert (job.run_directory / "export" / "model.safetensors").read_bytes() == (
        undisturbed.run_directory / "export" / "model.safetensors"
    ).read_bytes()
    return resumed_from


def test_two_nodes_train_and_export_a_model_and_the_dependent_job_starts(undisturbed, cluster):
    from transformers import AutoModelForCausalLM

    assert undisturbed.field("JobState") == "COMPLETED", undisturbed.text()
    assert re.search(r"on node\[1-2\]: 2 x 1 ranks, master node1:[23]\d{4},", undisturbed.launcher_log())
    assert undisturbed.launcher_log().endswith("completed")
    AutoModelForCausalLM.from_pretrained(undisturbed.run_directory / "export")
    assert len(undisturbed.losses()) == NUM_STEPS
    logs = {
        path.relative_to(undisturbed.directory / "logs/run0").parts[0]
        for path in undisturbed.directory.rglob("stdout.log")
    }
    assert logs == {"node0", "node1"}
    wait_until(
        lambda: "COMPLETED" in cluster.run("scontrol", "show", "job", undisturbed.next_id), 20, "the dependent job"
    )


def test_run_near_its_time_limit_saves_and_resumes_after_a_requeue(submit, undisturbed, cluster):
    job = submit(**PACED | {"PACE_SECONDS": "2"})
    job.wait_for("'loss'")
    minutes, seconds = map(int, job.field("RunTime").split(":")[1:])
    cluster.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes + 1 + (seconds > 0)}")
    job.wait_for("time limit: back in the queue", 60)  # slurmctld checks every 30 s
    cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    assert_resumed(job, undisturbed)
    assert "restart 1 after: time limit" in job.launcher_log()


@pytest.mark.parametrize("grace_seconds", [20, 0])
def test_preempted_run_saves_and_resumes_after_the_other_job(submit, undisturbed, cluster, grace_seconds):
    cluster.run("scontrol", "update", "PartitionName=main", f"GraceTime={grace_seconds}")
    job = submit(**PACED)
    job.wait_for("'loss'")
    urgent = ["--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"]
    urgent_id = cluster.run("sbatch", *urgent).strip()
    assert_resumed(job, undisturbed)
    assert "restart 1 after: preemption" in job.launcher_log()
    assert "COMPLETED" in cluster.run("scontrol", "show", "job", urgent_id)


def test_job_is_requeued_and_resumes_after_a_node_crashes(submit, undisturbed, cluster):
    job = submit(**PACED)
    wait_until(job.checkpoints, 90, job.text)
    assert cluster.script("crash", "node2").returncode == 0
    started, saved = time.monotonic(), job.checkpoints()[-1]
    try:
        wait_until(lambda: job.field("Restarts") == "1", 60, job.text)
        assert time.monotonic() - started < 60
    finally:
        assert cluster.script("boot", "node2").returncode == 0
    assert assert_resumed(job, undisturbed) in (saved, saved + 4)  # or from the checkpoint in flight at the crash
    assert "restart 1 after: node failure" in job.launcher_log()


def test_canceled_run_is_not_requeued_and_leaves_no_process(submit, cluster):
    job = submit(**PACED)
    job.wait_for("'loss'")
    cluster.run("scancel", job.id)
    job.wait_until_state("CANCELLED", 30)
    assert "cancelled: Slurm ends the job" in job.launcher_log()
    wait_until(cluster.is_idle, 20, "two idle nodes")
    left = cluster.run("srun", "--nodes=2", "bash", "-c", "pgrep -fc [p]aced_sft || true")
    assert left.split() == ["0", "0"]


def test_failed_run_shows_the_first_failing_rank_and_blocks_dependent_jobs(submit, cluster):
    failed = submit("rank", **PACED, FAILING_RANK="1")
    rejected = submit("argument", "--lr_scheduler_type", "none of these")
    dependent = ["--parsable", f"--dependency=afterok:{failed.id}", "--output=/dev/null", "--wrap=true"]
    next_id = cluster.run("sbatch", *dependent).strip()
    for job in (failed, rejected):
        job.wait_until_state("FAILED", 90)
        assert job.field("ExitCode") == "1:0"
        assert job.field("Restarts") == "0"
    traceback = failed.text().split("the first traceback, from ")[1]
    assert "/node1/" in traceback.splitlines()[0]
    assert traceback.rstrip().endswith("ArithmeticError: failing rank")
    assert re.search("errors found in .*\nRecipeError: .*none of these.*\n?$", rejected.text())
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
        ports.add(re.search(r"1 x 2 ranks, master node1:(\d+)", job.launcher_log()).group(1))
        assert (job.run_directory / "export" / "model.safetensors").is_file()
    assert len(ports) == 2
    assert first.checkpoints()
    assert not second.checkpoints()  # because of save_model=False
