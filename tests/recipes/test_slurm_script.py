"""Launch files and docs that no test runs to the end name only files, programs and options that exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.recipes.launching import ROOT, environment

SLURM_FILES = [ROOT / "recipes" / "launch.slurm", ROOT / "recipes" / "slurm" / "finetune.sh"]
DOCUMENT = (ROOT / "docs" / "slurm.md").read_text()


def check_launch(command, num_nodes, monkeypatch, tmp_path):
    """Give an `accelerate launch` line to Accelerate's and to the recipe's own parsers."""
    from accelerate.commands.launch import launch_command_parser

    from hf_fsdp_recipes.training.arguments import parse_arguments

    words = shlex.split(command)
    assert words[:2] == ["accelerate", "launch"]
    parsed, unknown = launch_command_parser().parse_known_args(words[2:])
    assert not unknown
    assert (ROOT / parsed.training_script).is_file()
    template = yaml.safe_load((ROOT / parsed.config_file).read_text())
    assert template["distributed_type"] == "FSDP"
    assert (parsed.num_machines or template["num_machines"]) == num_nodes
    assert (parsed.num_processes or template["num_processes"]) == num_nodes * 8
    assert parsed.machine_rank == 0
    assert parsed.main_process_ip
    assert parsed.main_process_port
    monkeypatch.chdir(tmp_path)
    arguments = parse_arguments(parsed.training_script_args)
    assert arguments.training.resume_from_checkpoint == "auto"


def expand(script, **variables):
    """Return the `accelerate` command line as bash expands it; run nothing else in the script."""
    code = 'exec() { "$@"; }; cd() { :; }; accelerate() { printf "%q " accelerate "$@"; }\n' + script
    done = subprocess.run(
        ["bash", "-euc", code], env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_skypilot_example_names_what_exists(monkeypatch, tmp_path):
    text = (ROOT / "recipes" / "skypilot.yaml").read_text()
    task = yaml.safe_load(text)
    assert "Never run" in text
    assert set(task) == {"name", "resources", "num_nodes", "workdir", "volumes", "setup", "run"}
    command = expand(
        task["run"],
        SKYPILOT_NUM_NODES=str(task["num_nodes"]),
        SKYPILOT_NUM_GPUS_PER_NODE=task["resources"]["accelerators"].split(":")[1],
        SKYPILOT_NODE_RANK="0",
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
    )
    assert "--main_process_ip 10.0.0.1 " in command
    (mount,) = task["volumes"]
    assert f"--output_dir {mount}/" in command
    check_launch(command, task["num_nodes"], monkeypatch, tmp_path)


def test_hugging_face_jobs_accepts_the_command_and_the_recipe_its_fields(monkeypatch, tmp_path):
    from hf_fsdp_recipes.training.arguments import parse_arguments

    page = (ROOT / "docs" / "jobs.md").read_text()
    words = shlex.split(page[page.index("hf jobs run --flavor") :].partition("```")[0].replace("\\\n", " "))
    command = [str(Path(sys.executable).with_name("hf")), "jobs", "run", "--dry-run", *words[3:]]
    found = subprocess.run(command, env=environment(HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=100)
    assert found.returncode == 0 and "not submitted" in found.stdout + found.stderr, found.stderr
    recipe = shlex.split(words[-1].partition("&& ")[2])
    assert recipe[:4] == ["hf-fsdp", "sft", "--accelerate_config", "fsdp2_full_shard"]
    monkeypatch.chdir(tmp_path)
    arguments = parse_arguments([*recipe[4:], "--bf16", "false", "--use_cpu", "true"])
    assert arguments.training.resume_from_checkpoint == "auto" and arguments.recipe.checkpoint_mirror == "/runs/qwen3"


def test_kubernetes_example_names_what_exists(monkeypatch, tmp_path):
    text = (ROOT / "recipes" / "kubernetes.yaml").read_text()
    runtime, job = yaml.safe_load_all(text)
    assert "Never run" in text
    assert {runtime["apiVersion"], job["apiVersion"]} == {"trainer.kubeflow.org/v1alpha1"}
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    trainer, policy = job["spec"]["trainer"], runtime["spec"]["mlPolicy"]
    assert trainer["numNodes"] == policy["numNodes"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = node["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    command = expand(
        trainer["args"][0],
        PET_NNODES="2",
        PET_NPROC_PER_NODE="8",
        PET_NODE_RANK="0",
        PET_MASTER_ADDR="qwen3-8b-node-0-0.qwen3-8b",
        PET_MASTER_PORT="29400",
    )
    assert f"--output_dir {mounts['runs']}/" in command
    check_launch(command, 2, monkeypatch, tmp_path)


def test_slurm_files_are_valid_and_ask_slurm_for_the_same():
    directives = []
    for file in SLURM_FILES:
        assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
        directives.append(re.findall(r"^#SBATCH .*", file.read_text(), flags=re.MULTILINE))
    assert directives[0] == directives[1]
    assert "#SBATCH --signal=B:USR1@120" in directives[0]
    for name in re.findall(
        r"(?:accelerate_configs|recipes|docs)/[\w./]+\.(?:yaml|py|md|slurm)", SLURM_FILES[0].read_text()
    ):
        assert (ROOT / name).exists(), name


FAKE_SLURM = {
    "srun": """while [[ $1 = --* ]]; do echo "$1" >> "$RECORD.srun"; shift; done; status=0
        for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || status=$?; done; exit $status""",
    "scontrol": """[ "$2" = hostnames ] && echo node0 || echo "JobId=1 JobState=RUNNING Restarts=0 StdOut=/dev/null " """,
    "nproc": '[ "$*" = --all ] && echo "$ALL_CORES" || echo 16',
    "python": '''[ "$1" = -c ] && [[ $2 = *set_numa_affinity* ]] && [[ $2 = *"range($RANKS_PER_NODE)"* ]] &&
        exit "$CANNOT_BIND"''',
    "lscpu": 'printf "%s\\n" "# CORE" 0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7',
    "hf-fsdp": """case $1 in preflight) echo "${*:1:3}" >> "$RECORD"; exit ;; config) echo "# $3"; exit ;; esac
        exec accelerate hf-fsdp "$@" """,
    "accelerate": """echo "$*" > "$RECORD.command"
        echo "$SLURM_NODEID $OMP_NUM_THREADS ${ACCELERATE_CPU_AFFINITY:-unset}" >> "$RECORD"
        [ -z "$TIMES_OUT" ] || echo trace > "$TORCH_FR_DUMP_TEMP_FILE$SLURM_NODEID"; exit 1""",
}


def submit(directory, **variables):
    """Run launch.slurm with stand-ins for Slurm's programs; return its output and each launcher's arguments."""
    (directory / "bin").mkdir()
    for name, script in FAKE_SLURM.items():
        (directory / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (directory / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "NPROC_PER_NODE": "4"}
    job |= {"LOG_DIR": f"{directory}/logs", "VENV": str(directory), "PREFLIGHT": "0", "RECORD": f"{directory}/record"}
    job |= {
        "ALL_CORES": "16",
        "CANNOT_BIND": "0",
        "TIMES_OUT": "",
        "PATH": f"{directory}/bin:/usr/bin:/bin",
    } | variables
    command = ["bash", str(SLURM_FILES[0]), "--config", "X.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=job, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr == ""
    record = directory / "record"
    return done.stdout.splitlines(), record.read_text().splitlines() if record.exists() else []


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({}, "4 1"),
        ({"OMP_NUM_THREADS": "3", "ACCELERATE_CPU_AFFINITY": "0"}, "3 0"),
        ({"NPROC_PER_NODE": "32", "CANNOT_BIND": "1"}, "1 unset"),
        ({"ALL_CORES": "64"}, "4 unset"),
        ({"TEMPLATE": "accelerate_configs/fsdp2_cpu.yaml"}, "2 unset"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "4 1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, "4 1"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "4 unset"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, "4 unset"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,33"}, "4 unset"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3,GPU-4"}, "4 unset"),
        ({"ROCR_VISIBLE_DEVICES": "1,0,2,3"}, "4 unset"),
    ],
)
def test_ranks_get_their_share_of_cores_and_are_bound_to_them_if_that_works(tmp_path, variables, given):
    _, launchers = submit(tmp_path, **variables)
    assert launchers == [f"0 {given}", f"1 {given}"]


def test_python_environment_that_is_not_there_is_named(tmp_path):
    printed, launchers = submit(tmp_path, VENV=f"{tmp_path}/nowhere", SLURMD_NODENAME="node0")
    assert f"VENV {tmp_path}/nowhere is not a directory on node0. Set VENV to" in printed[-1]
    assert launchers == []


def test_each_node_expands_its_own_rank(tmp_path):
    """In double quotes, SLURM_NODEID would expand on the batch host, and every node would get node rank 0."""
    _, launchers = submit(tmp_path, PREFLIGHT="1")
    assert launchers == ["preflight --node-rank 0", "preflight --node-rank 1", "0 4 1", "1 4 1"]


def test_a_template_is_a_file_or_a_name_and_a_script_replaces_the_package_s_own(tmp_path):
    for name in ("name", "file"):
        (tmp_path / name).mkdir()
    lines, _ = submit(tmp_path / "name", TEMPLATE="fsdp2_hybrid_shard", TRAINER="dpo")
    assert ", template fsdp2_hybrid_shard, each rank's output in " in lines[0]
    template = tmp_path / "name" / "logs" / "run0" / "template.yaml"
    assert set(template.read_text().splitlines()) == {"# fsdp2_hybrid_shard"}
    started = (tmp_path / "name" / "record.command").read_text().split()
    assert started[:4] == ["hf-fsdp", "dpo", "--accelerate_config", str(template)]
    assert started[-4:] == ["--resume_from_checkpoint", "auto", "--config", "X.yaml"]
    submit(tmp_path / "file", TEMPLATE="accelerate_configs/fsdp2_cpu.yaml", SCRIPT="mine.py")
    started = (tmp_path / "file" / "record.command").read_text().split()
    assert started[:3] == ["launch", "--config_file", "accelerate_configs/fsdp2_cpu.yaml"]
    assert started[-5:] == ["mine.py", "--resume_from_checkpoint", "auto", "--config", "X.yaml"]


@pytest.mark.parametrize(
    ("given", "besides"), [({}, ""), ({"CONTAINER_MOUNTS": "/data:/data,/x:/y"}, ",/data:/data,/x:/y")]
)
def test_container_mounts_the_current_directory_and_what_is_given_besides(tmp_path, given, besides):
    submit(tmp_path, CONTAINER="/images/hf.sqsh", **given)
    options = set((tmp_path / "record.srun").read_text().splitlines()) - {
        "--kill-on-bad-exit=1",
        "--nodes=1",
        "--ntasks=1",
    }
    image, mounts, directory = (
        "--container-image=/images/hf.sqsh",
        f"{ROOT}:{ROOT}{besides}",
        f"--container-workdir={ROOT}",
    )
    assert options == {image, f"--container-mounts={mounts}", directory}


def test_last_line_of_a_collective_timeout_names_the_traces(tmp_path):
    lines, _ = submit(tmp_path, TIMES_OUT="1")
    logs = f"{tmp_path}/logs/run0"
    assert lines[-1].partition(": ")[2] == (
        f"a collective timed out; 2 ranks wrote their last NCCL calls to {logs}/nccl_trace_rank_*: torchfrtrace --prefix "
        f"nccl_trace_rank_ {logs} names the ranks that did not join it"
    )
    assert {file.name for file in Path(logs).glob("nccl*")} == {"nccl_trace_rank_0", "nccl_trace_rank_1"}


def test_run_that_fails_otherwise_does_not_mention_traces(tmp_path):
    lines, _ = submit(tmp_path)
    assert not any("NCCL" in line for line in lines)


def test_torch_has_the_variables_of_the_script():
    """If torch renames these variables, traces go to the home directory."""
    import torch

    library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    assert b"TORCH_FR_DUMP_TEMP_FILE" in library and b"TORCH_FR_BUFFER_SIZE" in library
    assert '"TORCH_NCCL_DUMP_ON_TIMEOUT"' in (headers / "ProcessGroupNCCL.hpp").read_text()


@pytest.mark.parametrize("arguments", [[], ["8", "1", "16", "model", "2-7B", "perhaps"]])
def test_finetune_refuses_what_is_not_its_six_arguments(arguments):
    variables = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "PATH": "/usr/bin:/bin"}
    command = ["bash", str(SLURM_FILES[1]), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "save_model" in done.stderr


def test_launch_lines_of_the_document_name_what_exists(monkeypatch, tmp_path):
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", DOCUMENT, flags=re.DOTALL)).replace("\\\n", " ")
    launches = [line for line in blocks.splitlines() if line.startswith("accelerate launch")]
    assert launches
    for line in launches:
        command = expand(line, MACHINE_RANK="0")
        check_launch(command, 2, monkeypatch, tmp_path)
    for script in re.findall(r"sbatch .*?(recipes/\S+\.(?:slurm|sh))", blocks):
        assert (ROOT / script).is_file()


@pytest.mark.slow
def test_torchrun_line_of_the_document_trains_and_exports(tiny_model, text_file, tmp_path):
    (block,) = re.findall(r"```bash\n(export ACCELERATE_USE_FSDP.*?)```", DOCUMENT, flags=re.DOTALL)
    settings = ["--max_length 64", "--max_steps 2", "--report_to none", "--per_device_train_batch_size 2"]
    line = block.strip().replace("\\\n", " ").replace("--nproc-per-node 8", "--nproc-per-node 2").replace("bf16", "no")
    line = line.replace("Qwen/Qwen3-8B", str(tiny_model("llama"))).replace("my_rows.jsonl", str(text_file))
    line = line.replace("runs/qwen3", str(tmp_path / "run")) + " " + " ".join(settings)
    assert "torchrun --standalone --nproc-per-node 2 recipes/sft.py" in line
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", line],
        cwd=ROOT,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
