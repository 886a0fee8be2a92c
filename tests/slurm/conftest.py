"""A two-node Slurm for the test session, and jobs on it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from tests.recipes.launching import ROOT, environment

SCRIPT = ROOT / "tests" / "slurm" / "cluster.sh"
SKIP_STATUS = 77  # exit status of cluster.sh on a machine that cannot run a cluster
FINISHED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
NUM_STEPS = 24
RECIPE = {
    "max_steps": NUM_STEPS,
    "save_steps": 4,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1.0e-2,
    "max_length": 64,
    "report_to": "none",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def wait_until(is_true, seconds, description):
    deadline = time.monotonic() + seconds
    while not (found := is_true()):
        assert time.monotonic() < deadline, (
            f"not within {seconds} s: {description() if callable(description) else description}"
        )
        time.sleep(0.3)
    return found


class Cluster:
    def __init__(self, state: Path) -> None:
        self.environment = environment(SLURM_TEST_DIR=str(state), PYTHONPATH=str(ROOT))
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment.pop("ACCELERATE_USE_CPU", None)  # launch.slurm detects it

    def script(self, *arguments: object, timeout_seconds: float = 60, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(SCRIPT), *map(str, arguments)],
            cwd=ROOT,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )

    def run(self, *arguments: object, **variables: str) -> str:
        done = self.script("run", *arguments, **variables)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def is_idle(self) -> bool:
        return self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D").strip() == "2"


class Job:
    """A job that runs recipes/launch.slurm (or the given script), with access to its output so far."""

    def __init__(self, cluster, directory, arguments, options=(), script="recipes/launch.slurm", **variables):
        self.cluster, self.directory, self.run_directory = cluster, directory, directory / "run"
        directory.mkdir(parents=True, exist_ok=True)
        self.output = directory / "output.txt"
        defaults = {
            "TEMPLATE": "accelerate_configs/fsdp2_cpu.yaml",
            "LOG_DIR": str(directory / "logs"),
            "PREFLIGHT": "0",
        }
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={self.output}", *options, script, *arguments]
        self.id = cluster.run(*command, **defaults | variables).strip()

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def launcher_log(self) -> str:
        return "\n".join(line for line in self.text().splitlines() if line.startswith("launch.slurm"))

    def field(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S*)", self.cluster.run("scontrol", "-o", "show", "job", self.id))
        return found.group(1) if found else ""

    def wait_for(self, pattern: str, seconds: float = 90) -> None:
        wait_until(lambda: re.search(pattern, self.text()), seconds, lambda: f"{pattern!r} in\n{self.text()}")

    def wait_until_state(self, state: str, seconds: float = 120) -> None:
        wait_until(
            lambda: self.field("JobState") in {state, *FINISHED}, seconds, lambda: f"{state} after\n{self.text()}"
        )
        assert self.field("JobState") == state, self.text()

    def checkpoints(self) -> list[int]:
        return sorted(int(path.parent.name[11:]) for path in self.run_directory.glob("checkpoint-*/manifest.json"))

    def losses(self) -> list[tuple[int, float]]:
        entries = [json.loads(line) for line in (self.run_directory / "metrics.jsonl").read_text().splitlines()]
        return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


@pytest.fixture(scope="session")
def cluster():
    state = Path(
        tempfile.mkdtemp(prefix="slurm-")
    )  # munge requires that everyone can enter the directories above its socket
    state.chmod(0o755)
    cluster = Cluster(state)
    started = cluster.script("start", timeout_seconds=300)
    if started.returncode == SKIP_STATUS:
        shutil.rmtree(state)
        pytest.skip(started.stderr.strip())
    try:
        assert started.returncode == 0, started.stderr
        yield cluster
    finally:
        cluster.script("stop")
        shutil.rmtree(state)


@pytest.fixture(scope="session")
def recipe(tiny_model, text_file, tmp_path_factory):
    file = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    model = {"model_name_or_path": str(tiny_model("llama")), "dataset_name": str(text_file)}
    file.write_text(yaml.safe_dump(RECIPE | model))
    return file


@pytest.fixture
def submit(cluster, recipe, tmp_path):
    """Return a function that submits the recipe. After the test all jobs are canceled and both nodes are idle."""

    def start(name="job", *arguments, **named) -> Job:
        directory = tmp_path / name
        return Job(cluster, directory, ["--config", recipe, "--output_dir", directory / "run", *arguments], **named)

    yield start
    cluster.run("scancel", "--user=root")
    wait_until(cluster.is_idle, 45, lambda: f"two idle nodes: {cluster.run('sinfo', '-N', '-l')}")


@pytest.fixture(scope="session")
def undisturbed(cluster, recipe, tmp_path_factory):
    """A job that runs to its end, and the ID of a job that depends on it."""
    directory = tmp_path_factory.mktemp("undisturbed")
    job = Job(cluster, directory, ["--config", recipe, "--output_dir", directory / "run"], PREFLIGHT="1")
    dependent = ["--parsable", f"--dependency=afterok:{job.id}", "--output=/dev/null", "--wrap=true"]
    job.next_id = cluster.run("sbatch", *dependent).strip()
    wait_until(lambda: job.field("JobState") in FINISHED, 120, job.text)
    return job
