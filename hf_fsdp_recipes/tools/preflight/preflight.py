"""Finds out within a minute whether the nodes of a job can work together, and names the node that cannot. Run

    hf-fsdp preflight --num-nodes 2 --node-rank $SLURM_NODEID --nproc-per-node 8 --master-addr nodea --master-port 29500

once on every node, or without these flags under a launcher: `torchrun ... --no-python hf-fsdp preflight`. Node 0 prints a
table; all nodes report the same error.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import PreflightError, TemplateError
from hf_fsdp_recipes.tools.preflight import addresses, bandwidth_advice, devices, node_info, output_directory
from hf_fsdp_recipes.tools.preflight.membership import ParticipantInfo
from hf_fsdp_recipes.tools.preflight.node_info import NodeInfo, Row
from hf_fsdp_recipes.tools.preflight.rendezvous import Rendezvous
from hf_fsdp_recipes.tools.preflight.workers import Workers

MIN_CHECK_SECONDS = 30.0  # for the checks after all nodes have joined, even if --timeout is shorter
MARGIN_SECONDS = 3.0  # a worker that hangs is reported this long before node 0 stops waiting for its node


class Job:
    """The job that a preflight is for.

    Attributes:
        config, recipe: the content of its Accelerate config and its recipe; empty if not given.
        output_dir: where the run will write, if known.
    """

    def __init__(self, template: Path | None, recipe_file: Path | None, output_dir: Path | None) -> None:
        self.template, self.recipe_file, self.output_dir = template, recipe_file, output_dir
        self.config: dict[str, Any] = {}
        self.recipe: dict[str, Any] = {}

    def read(self) -> NodeInfo:
        """Read the job's files and return this node's facts, or raise PreflightError if one is missing or not YAML."""
        node = node_info.collect([file for file in (self.template, self.recipe_file) if file is not None])
        try:
            self.config = validate.read_config(self.template) if self.template else {}
            self.recipe = validate.read_config(self.recipe_file) if self.recipe_file else {}
        except TemplateError as error:
            raise PreflightError(str(error)) from error
        if self.output_dir is None and self.recipe.get("output_dir"):
            self.output_dir = Path(self.recipe["output_dir"])
        return node

    @property
    def is_on_cpu(self) -> bool:
        """Whether the job uses the CPU even on machines with accelerators."""
        flags = (self.config.get("use_cpu", False), os.environ.get("ACCELERATE_USE_CPU", "false"))
        return any(is_true(flag) for flag in flags)


def run(info: ParticipantInfo, job: Job, timeout_seconds: float) -> list[str]:
    """Run all checks; return the lines of the table, warnings last.

    Collective: every node must call this.

    Raises:
        PreflightError: all errors of the first stage that failed, the same on every node that joined.
    """
    started = time.monotonic()
    with contextlib.closing(Rendezvous(info, timeout_seconds)) as rendezvous:
        rendezvous.check_membership()
        rendezvous.extend_deadline(max(timeout_seconds, MIN_CHECK_SECONDS))
        rows: list[Row] = [
            ("nodes", ", ".join(rendezvous.names)),
            ("master", f"{addresses.describe(info.master_address)} port {info.master_port}"),
        ]
        rows += _check_software(rendezvous, job)
        with contextlib.closing(Workers(rendezvous, job.is_on_cpu)) as workers:
            rows += _check_output(rendezvous, job)
            rows += _check_devices(rendezvous, workers)
            rows += _measure_bandwidth(rendezvous, workers, job)
    lines = [f"{label:<10}{text}" for label, text in rows if label != "warning"]
    lines += [f"warning: {text}" for label, text in rows if label == "warning"]
    return [*lines, f"preflight passed in {time.monotonic() - started:.1f} s"]


def _check_software(rendezvous: Rendezvous, job: Job) -> list[Row]:
    num_nodes, ranks_per_node = rendezvous.info.num_nodes, rendezvous.info.ranks_per_node

    def evaluate(nodes: list[NodeInfo]) -> list[Row]:
        node_info.check_same(nodes, rendezvous.names)
        node_info.check_host_names(nodes, rendezvous.names)
        warnings = node_info.find_warnings(nodes, rendezvous.names, num_nodes * ranks_per_node)
        if job.template is not None:
            launched = bandwidth_advice.apply_launch_counts(job.config, num_nodes, ranks_per_node)
            warnings += [f"{job.template.name}: {fault}" for fault in validate.find_faults(launched)]
        return [*node_info.describe(nodes), *(("warning", warning) for warning in warnings)]

    return rendezvous.run_stage("comparing versions, code and files", job.read, evaluate)


def _check_output(rendezvous: Rendezvous, job: Job) -> list[Row]:
    directory, names, node_rank = job.output_dir, rendezvous.names, rendezvous.info.node_rank
    if directory is None:
        return [("output", "not checked: neither --output-dir nor a recipe with output_dir was given")]
    run_id = f"{rendezvous.leader.host}-{rendezvous.leader.pid}"
    files = [directory / f".preflight-{run_id}-{index}" for index in range(len(names))]
    try:
        row = rendezvous.run_stage(
            "writing to the output directory",
            lambda: output_directory.write_probe(files[node_rank]),
            lambda probes: output_directory.describe(directory, probes, names),
        )
        rendezvous.run_stage(
            "looking for the other nodes' files in the output directory",
            lambda: output_directory.find_invisible(files),
            lambda invisible: output_directory.check_shared(directory, invisible, names),
        )
    finally:
        with contextlib.suppress(OSError):
            files[node_rank].unlink()
    if not job.recipe:
        return [row]
    space = rendezvous.run_stage(
        "estimating what the run will write",
        lambda: [_check_space(directory, job.recipe)] if rendezvous.is_leader else [],
        lambda rows: rows[0],
    )
    return [row, *space]


def _check_space(directory: Path, recipe: dict[str, Any]) -> Row:
    try:
        estimate = disk_estimate.estimate(recipe)
    except Exception as error:  # builds the model, which may run any code; a missing estimate should not stop the job
        return ("warning", f"what the run will write could not be estimated: {error}")
    return output_directory.check_space(directory, estimate)


def _check_devices(rendezvous: Rendezvous, workers: Workers) -> list[Row]:
    stage = "looking at the devices"

    def evaluate(found: list[list[devices.DeviceInfo]]) -> list[Row]:
        devices.check_devices(found, rendezvous.names, rendezvous.info.ranks_per_node)
        return devices.describe(found, rendezvous.names)

    deadline = rendezvous.deadline - MARGIN_SECONDS
    return rendezvous.run_stage(stage, lambda: workers.wait_for_reports("device", stage, deadline), evaluate)


def _measure_bandwidth(rendezvous: Rendezvous, workers: Workers, job: Job) -> list[Row]:
    stage = "measuring bandwidth"
    deadline = rendezvous.deadline - MARGIN_SECONDS

    def collect() -> list[bandwidth_advice.WorkerRates]:
        if rendezvous.is_leader:
            workers.start_measuring(max(1.0, deadline - time.monotonic() - MARGIN_SECONDS))
        return workers.wait_for_reports("rates", stage, deadline)

    def evaluate(rates: list[list[bandwidth_advice.WorkerRates]]) -> list[Row]:
        ranks_per_node = rendezvous.info.ranks_per_node
        return bandwidth_advice.describe(job.config, job.recipe, rates, rendezvous.names, ranks_per_node)

    return rendezvous.run_stage(stage, collect, evaluate)


def read_launcher(environment: Mapping[str, str]) -> ParticipantInfo:
    """Return the node that a launcher has started this rank on; PreflightError if it set only some of its variables."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise PreflightError(
            f"WORLD_SIZE is set but {', '.join(missing)} is not. Start the preflight with torchrun or accelerate launch, or "
            f"pass --num-nodes, --node-rank, --nproc-per-node, --master-addr and --master-port."
        )
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    ranks_per_node = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return ParticipantInfo(rank // ranks_per_node, world_size // ranks_per_node, ranks_per_node, address, port)


def check_nodes(
    num_nodes: int | None,
    node_rank: int | None,
    nproc_per_node: int,
    master_addr: str | None,
    master_port: int,
    job: Job,
    timeout: float,
) -> None:
    """Run the preflight of this node and print the table on node 0.

    Without `num_nodes` and `node_rank` the launcher's variables tell them, and only local rank 0 of a node does the work.

    Raises:
        PreflightError: the same on every node that can be reached.
    """
    # An exit that unwinds the stack also kills the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if num_nodes is None and node_rank is None and "WORLD_SIZE" in os.environ:
        info = read_launcher(os.environ)
        if os.environ["LOCAL_RANK"] != "0":
            return  # local rank 0 checks the node for all its ranks
    else:
        num_nodes = num_nodes or 1
        if num_nodes > 1 and (node_rank is None or master_addr is None):
            raise PreflightError(
                f"--num-nodes {num_nodes} also needs --node-rank and --master-addr; pass both on every node."
            )
        info = ParticipantInfo(node_rank or 0, num_nodes, nproc_per_node, master_addr or "127.0.0.1", master_port)
    lines = run(info, job, timeout)
    if info.node_rank == 0:
        print("\n".join(lines), flush=True)
