"""A two-node Slurm for the test session, and jobs on it."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.ranks.harness import read_losses
from tests.recipes.launching import ROOT, SETTINGS, environment, write_recipe

SCRIPT = ROOT / "tests" / "slurm" / "cluster.sh"
SKIP_STATUS = 77  # exit status of cluster.sh on a machine that cannot run a cluster
NUM_STEPS = 24


def wait_until(is_true, seconds, describe):
    deadline = time.monotonic() + seconds
    while not (found := is_true()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {describe()}"
        time.sleep(0.3)
    return found


class Cluster:
    """A running cluster.sh, and the clients in its network."""

    def __init__(self, state: Path) -> None:
        self.process = subprocess.Popen(
            [str(SCRIPT), str(state)], stderr=subprocess.PIPE, text=True
        )
        self.environment = environment(SLURM_CONF=str(state / "slurm.conf"), PYTHONPATH=str(ROOT))
        self.environment["PATH"] = (
            f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        )

    def client(
        self, *command: object, timeout: float = 90, **variables: str
    ) -> subprocess.CompletedProcess:
        [inside] = psutil.Process(self.process.pid).children()
        command = ["nsenter", "--net", "-t", str(inside.pid), *map(str, command)]
        variables = self.environment | variables
        return subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout
        )

    def run(self, *command: object, **variables: str) -> str:
        done = self.client(*command, **variables)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def is_idle(self) -> bool:
        return self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D").strip() == "2"


class Job:
    """A job that runs recipes/launch.slurm, or another script."""

    def __init__(
        self, cluster, directory, arguments, script="recipes/launch.slurm", options=(), **variables
    ):
        self.cluster = cluster
        self.run_directory = directory / "run"
        self.output = directory / "output.txt"
        directory.mkdir(parents=True, exist_ok=True)
        defaults = {
            "TEMPLATE": "cpu",
            "NPROC_PER_NODE": "1",
            "LOG_DIR": str(directory / "logs"),
            "PREFLIGHT": "0",
        }
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={self.output}", *options]
        command += [script, *arguments]
        self.id = cluster.run(*command, **defaults | variables).strip()

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def field(self, name: str) -> str:
        shown = self.cluster.run("scontrol", "-o", "show", "job", self.id)
        found = re.search(rf"\b{name}=(\S*)", shown)
        return found.group(1) if found else ""

    def wait_for(self, pattern: str, seconds: float = 120) -> None:
        wait_until(
            lambda: re.search(pattern, self.text()),
            seconds,
            lambda: f"{pattern!r} in\n{self.text()}",
        )

    def wait_until_state(self, state: str, seconds: float = 180) -> None:
        ended = {state, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
        wait_until(lambda: self.field("JobState") in ended, seconds, self.text)
        assert self.field("JobState") == state, self.text()

    def losses(self) -> list[float]:
        return read_losses(self.run_directory)


@pytest.fixture(scope="session")
def cluster():
    state = Path(tempfile.mkdtemp(prefix="slurm-"))
    state.chmod(0o755)  # munge wants directories that everyone can enter
    cluster = Cluster(state)
    try:
        is_up = (state / "ready").exists
        wait_until(
            lambda: is_up() or cluster.process.poll() is not None,
            200,
            lambda: f"logs are in {state}",
        )
        if cluster.process.returncode == SKIP_STATUS:
            pytest.skip(cluster.process.stderr.read().strip())
        assert is_up(), cluster.process.stderr.read()
        yield cluster
    finally:
        cluster.process.kill()  # and with it all processes of the cluster
        cluster.process.wait()
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="session")
def recipe(tiny_model, text_file, tmp_path_factory):
    names = {"model_name_or_path": tiny_model("llama"), "dataset_name": text_file}
    file = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    write_recipe(file, SETTINGS | {"max_steps": NUM_STEPS, "save_steps": 4} | names)
    return file


@pytest.fixture
def submit(cluster, recipe, tmp_path):
    """Return a function that submits the recipe.

    After the test, all jobs are cancelled and both nodes are idle.
    """

    def start(name="job", *arguments, **named) -> Job:
        directory = tmp_path / name
        always = ["--config", recipe, "--output_dir", directory / "run"]
        return Job(cluster, directory, [*always, *arguments], **named)

    yield start
    cluster.run("scancel", "--user=root")
    wait_until(cluster.is_idle, 45, lambda: f"two idle nodes: {cluster.run('sinfo', '-N', '-l')}")


@pytest.fixture(scope="session")
def undisturbed(cluster, recipe, tmp_path_factory):
    """A job that has run to its end."""
    directory = tmp_path_factory.mktemp("undisturbed")
    arguments = ["--config", recipe, "--output_dir", directory / "run"]
    job = Job(
        cluster,
        directory,
        arguments,
        options=["--gpus-per-node=1"],
        NPROC_PER_NODE="",
        PREFLIGHT="1",
    )
    job.wait_until_state("COMPLETED")
    return job
