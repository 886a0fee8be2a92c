"""launch.slurm with stand-ins for Slurm's programs, and the other launch files.

tests/slurm runs launch.slurm on a real Slurm.
"""

import re
import shlex
import subprocess

import pytest
import yaml

from tests.recipes.launching import ROOT

RECIPES = ROOT / "recipes"
CAPTURED = {"capture_output": True, "text": True, "timeout": 60}
FAKES = {
    "srun": """while [[ $1 = --* ]]; do echo "srun $1" >> "$RECORD"; shift; done; status=0
        for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || status=$?; done; exit $status""",
    "scontrol": """[ "$2" = hostnames ] && echo node0 && exit
        [ "$1" = requeue ] && echo requeue >> "$RECORD" || echo "JobId=1 $JOB" """,
    "hf-fsdp": """[ "$1" = config ] && echo "/t/$3.yaml" && exit
        echo "hf-fsdp $*" >> "$RECORD"
        [ "$1" = preflight ] || { echo "$PRINTED" > "$LOGS/out"; exit "$STATUS"; }""",
    "accelerate": """echo "accelerate $*" >> "$RECORD"; exit 0""",
}


def submit(
    directory,
    *,
    status=0,
    printed="",
    job="JobState=RUNNING Restarts=0 PreemptTime=None",
    **variables,
):
    """Run launch.slurm as a job of two nodes.

    Return its exit status, its output and the commands that it ran.
    """
    (directory / "bin").mkdir(exist_ok=True)
    (directory / "record").touch()
    for name, script in FAKES.items():
        (directory / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (directory / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{directory}/bin:/usr/bin:/bin",
        "RECORD": f"{directory}/record",
        "LOG_DIR": f"{directory}/logs",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_ON_NODE": "16",
        "SLURM_GPUS_ON_NODE": "4",
        "STATUS": str(status),
        "PRINTED": printed,
        "JOB": f"{job} ",
        "VENV": str(directory),
    }
    command = ["bash", str(RECIPES / "launch.slurm"), "--config", "X"]
    done = subprocess.run(command, env=environment | variables, cwd=directory, **CAPTURED)
    return done.returncode, done.stdout + done.stderr, (directory / "record").read_text()


def test_each_node_is_checked_and_launched_with_its_own_rank_and_the_same_arguments(tmp_path):
    status, output, commands = submit(tmp_path)
    shared = (
        "--num_machines 2 --num_processes 8 --main_process_ip node0 --main_process_port 20001 "
        "--machine_rank"
    )
    lines = [line for line in commands.splitlines() if line.startswith("hf-fsdp")]
    for node in (0, 1):
        assert (
            lines[node]
            == f"hf-fsdp preflight --accelerate_config full_shard {shared} {node} --config X"
        )
        start = (
            f"hf-fsdp sft --accelerate_config full_shard {shared} {node} "
            f"--log_dir {tmp_path}/logs/1/run0/node{node} --tee "
        )
        assert lines[2 + node].startswith(start)
        assert lines[2 + node].endswith(" --resume_from_checkpoint auto --config X")
    assert len(lines) == 4 and status == 0 and output.endswith("completed\n")


def test_a_script_of_ones_own_a_hybrid_template_and_a_container_are_passed_on(tmp_path):
    settings = {
        "TEMPLATE": "hybrid_shard",
        "SCRIPT": "mine.py",
        "CONTAINER": "/x.sqsh",
        "CONTAINER_MOUNTS": "/data:/data",
    }
    _, _, commands = submit(tmp_path, PREFLIGHT="0", **settings)
    launches = re.findall("accelerate .*", commands)
    assert len(launches) == 2 and "hf-fsdp" not in commands
    for launch in launches:
        assert launch.startswith(
            "accelerate launch --config_file /t/hybrid_shard.yaml --num_machines 2 "
        )
        assert (
            "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 4"
            in launch
        )
        assert launch.endswith("mine.py --resume_from_checkpoint auto --config X")
    assert "srun --container-image=/x.sqsh" in commands
    assert f"srun --container-mounts={tmp_path}:{tmp_path},/data:/data" in commands


SAVED = "stopped by a signal; resume from runs/mine/checkpoint-2"

ENDINGS = [
    ("JobState=RUNNING Restarts=0 PreemptTime=None", SAVED, True, "back in the queue"),
    (
        "JobState=RUNNING Restarts=0 PreemptTime=2026-01-01T00:00:00",
        "",
        True,
        "without a new checkpoint",
    ),
    ("JobState=RUNNING Restarts=0 PreemptTime=None", "ValueError: no", False, "failed; the output"),
    (
        "JobState=RUNNING Restarts=0 PreemptTime=None",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        False,
        "out of memory, it seems (OutOfMemoryError)",
    ),
    ("JobState=CANCELLED Restarts=0 PreemptTime=None", SAVED, False, "cancelled"),
    ("JobState=PENDING Restarts=1 PreemptTime=None", SAVED, False, "Slurm has put the job back"),
]


@pytest.mark.parametrize(("job", "printed", "is_requeued", "said"), ENDINGS)
def test_a_job_is_requeued_if_it_saved_or_was_preempted_and_not_if_it_failed(
    tmp_path, job, printed, is_requeued, said
):
    status, output, commands = submit(tmp_path, status=1, printed=printed, job=job)
    assert status == (0 if is_requeued else 1) and said in output
    assert ("requeue" in commands.splitlines()) == is_requeued
    assert "ValueError" not in printed or "\nValueError: no\n" in output
    assert ("out of memory" in output) == ("OutOfMemory" in printed)


def test_a_launcher_that_was_killed_without_a_word_ran_out_of_memory(tmp_path):
    status, output, _ = submit(tmp_path, status=137)
    assert status == 1 and "out of memory, it seems (exit status 137)" in output


def test_what_another_job_left_in_the_same_log_directory_does_not_count(tmp_path):
    old_logs = [tmp_path / "logs" / "run0", tmp_path / "logs" / "7" / "run0"]
    for directory in old_logs:
        directory.mkdir(parents=True)
        (directory / "out").write_text(f"{SAVED}\nCUDA out of memory\n")
    status, output, commands = submit(tmp_path, status=1, printed="ValueError: no")
    assert status == 1 and "requeue" not in commands and "out of memory" not in output


@pytest.mark.parametrize(
    ("lacks", "said"),
    [({"SLURM_GPUS_ON_NODE": ""}, "gpus-per-node=8"), ({"VENV": "/x"}, "VENV /x")],
)
def test_what_the_job_lacks_is_named(tmp_path, lacks, said):
    status, output, commands = submit(tmp_path, **lacks)
    assert status == 1 and said in output and not commands


@pytest.mark.parametrize("name", ["skypilot", "kubernetes"])
def test_the_launch_line_of_a_file_for_another_scheduler_is_accepted(name):
    from accelerate.commands.launch import launch_command_parser

    *_, task = yaml.safe_load_all((RECIPES / f"{name}.yaml").read_text())
    script = task["run"] if name == "skypilot" else task["spec"]["trainer"]["args"][0]
    line = re.search(r"exec (?:\.venv/bin/)?(hf-fsdp .*)", script, re.DOTALL).group(1)
    sky = (
        "SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8 SKYPILOT_NODE_RANK=1 "
        "SKYPILOT_NODE_IPS=10.0.0.1"
    )
    pet = (
        "PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1 PET_MASTER_ADDR=10.0.0.1 "
        "PET_MASTER_PORT=29500"
    )
    echo = subprocess.run(["bash", "-euc", f"{sky} {pet}; echo {line}"], check=True, **CAPTURED)
    words = shlex.split(echo.stdout)
    assert words[:6] == [
        "hf-fsdp",
        "sft",
        "--accelerate_config",
        "full_shard",
        "--config",
        "qwen3_8b_lora",
    ]
    assert words[-4] == "--output_dir" and words[-2:] == ["--resume_from_checkpoint", "auto"]
    options = launch_command_parser().parse_args([*words[6:-4], "sft.py"])
    assert (options.num_machines, options.num_processes, options.main_process_ip) == (
        2,
        16,
        "10.0.0.1",
    )


def test_finetune_sh_refuses_what_is_not_its_six_arguments():
    for arguments in ([], ["8", "1", "16", "model", "2-7B", "perhaps"]):
        command = [
            "env",
            "SLURM_JOB_ID=1",
            "bash",
            str(RECIPES / "slurm" / "finetune.sh"),
            *arguments,
        ]
        done = subprocess.run(command, **CAPTURED)
        assert done.returncode == 2 and "save_model" in done.stderr
