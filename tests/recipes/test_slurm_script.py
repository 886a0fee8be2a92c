"""Launch files and docs that no test runs to the end: everything that they name exists."""

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
    """Let bash say what `accelerate` would be called with; nothing else in the script is run."""
    code = 'exec() { "$@"; }; cd() { :; }; accelerate() { printf "%q " accelerate "$@"; }\n' + script
    done = subprocess.run(
        ["bash", "-euc", code], env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_skypilot_example_names_what_exists(monkeypatch, tmp_path):
    text = (ROOT / "recipes" / "skypilot.yaml").read_text()
    task = yaml.safe_load(text)
    assert "Not run" in text
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


def test_kubernetes_example_names_what_exists(monkeypatch, tmp_path):
    text = (ROOT / "recipes" / "kubernetes.yaml").read_text()
    runtime, job = yaml.safe_load_all(text)
    assert "Not run" in text
    assert {runtime["apiVersion"], job["apiVersion"]} == {"trainer.kubeflow.org/v1alpha1"}
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    trainer, policy = job["spec"]["trainer"], runtime["spec"]["mlPolicy"]
    assert trainer["numNodes"] == policy["numNodes"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == policy["torch"]["numProcPerNode"]
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
        assert (ROOT / name).exists() or name == "recipes/X.yaml", name


def test_each_node_expands_its_own_rank():
    """SLURM_NODEID in double quotes would be the batch host's, and every node rank 0."""
    for line in SLURM_FILES[0].read_text().splitlines():
        if "SLURM_NODEID" in line and not line.startswith("#"):
            assert line.count("'") or line.startswith("  --tee"), line


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
