"""Finds out, usually within a minute, whether the nodes of a job can work together, and names the node that cannot.

Run this once on every node:

    hf-fsdp preflight --num-nodes 2 --node-rank $SLURM_NODEID --nproc-per-node 8 --master-addr nodea --master-port 29500

Under a launcher, omit these flags: `torchrun ... --no-python hf-fsdp preflight`. Node 0 prints a table; if a check fails, all
nodes report the same error.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.configs.shipped_files import find_file, read_recipe
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import PreflightError, TemplateError
from hf_fsdp_recipes.tools.preflight import addresses, bandwidth_advice, devices, hardware, node_info, output_directory
from hf_fsdp_recipes.tools.preflight.node_info import NodeInfo, Row
from hf_fsdp_recipes.tools.preflight.rendezvous import ParticipantInfo, Rendezvous
from hf_fsdp_recipes.tools.preflight.workers import Workers

MIN_CHECK_SECONDS = 30.0  # time for the checks after all nodes have joined, even if --timeout is shorter
CHECK_SECONDS_PER_NODE = 0.5  # additional time, because node 0 hosts the store and all nodes write to one directory
MARGIN_SECONDS = 3.0  # each node gives up on a hung worker this many seconds before node 0 gives up on that node


class Job:
    """The job that a preflight checks."""

    def __init__(self, template: Path | None, recipe_file: Path | None, output_dir: Path | None) -> None:
        self.template, self.recipe_file, self.output_dir = template, recipe_file, output_dir
        self.config: validate.Section = {}  # content of the Accelerate config; empty if not given
        self.recipe: validate.Section = {}

    def read(self, num_ranks: int) -> NodeInfo:
        """Read the job's files and return this node's facts; raise PreflightError if a file is missing or not YAML."""
        if self.template is not None:
            self.template = find_file("accelerate_configs", self.template, PreflightError)
        if self.recipe_file is not None:
            self.recipe_file = find_file("recipes", self.recipe_file, PreflightError)
        files = [file for file in (self.template, self.recipe_file) if file is not None]
        node = node_info.collect(files, num_ranks)
        try:
            self.config = validate.read_config(self.template) if self.template else {}
            self.recipe = read_recipe(self.recipe_file, PreflightError) if self.recipe_file else {}
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


def check_node(info: ParticipantInfo, job: Job, timeout_seconds: float) -> None:
    """Run all checks and print the table on node 0, warnings last.

    Collective: every node must call this. All nodes raise the same PreflightError, with all errors of the first failed stage.
    """
    # On SIGTERM, raise SystemExit: unwinding the stack kills the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.monotonic()
    with contextlib.closing(Rendezvous(info, timeout_seconds)) as rendezvous:
        rendezvous.check_membership()
        rendezvous.extend_deadline(max(timeout_seconds, MIN_CHECK_SECONDS) + CHECK_SECONDS_PER_NODE * info.num_nodes)
        rows: list[Row] = [
            ("nodes", ", ".join(rendezvous.names)),
            ("master", f"{addresses.describe(info.master_address)} port {info.master_port}"),
        ]
        rows += _check_software(rendezvous, job)
        with contextlib.closing(Workers(rendezvous, job.is_on_cpu)) as workers:
            rows += _check_output(rendezvous, job)
            rows += _check_devices(rendezvous, workers)
            # Do this while the workers run, because they keep the driver loaded. Without workers and without persistence mode,
            # nvidia-smi would load the driver for each GPU.
            rows += _check_hardware(rendezvous, job)
            rows += _measure_bandwidth(rendezvous, workers, job)
    if info.node_rank == 0:
        lines = [f"{label:<10}{text}" for label, text in rows if label != "warning"]
        lines += [f"warning: {text}" for label, text in rows if label == "warning"]
        print("\n".join([*lines, f"preflight passed in {time.monotonic() - started:.1f} s"]), flush=True)


def _check_software(rendezvous: Rendezvous, job: Job) -> list[Row]:
    num_nodes, ranks_per_node = rendezvous.info.num_nodes, rendezvous.info.ranks_per_node

    def evaluate(nodes: list[NodeInfo]) -> list[Row]:
        node_info.check_same(nodes, rendezvous.names)
        node_info.check_host_names(nodes, rendezvous.names)
        warnings = node_info.find_warnings(nodes, rendezvous.names)
        if job.template is not None:
            launched = bandwidth_advice.apply_launch_counts(job.config, num_nodes, ranks_per_node)
            warnings += [f"{job.template.name}: {fault}" for fault in validate.find_faults(launched)]
        return [*node_info.describe(nodes), *(("warning", warning) for warning in warnings)]

    num_ranks = num_nodes * ranks_per_node
    return rendezvous.run_stage("comparing versions, code and files", lambda: job.read(num_ranks), evaluate)


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
        lambda: [output_directory.check_space(directory, job.recipe)] if rendezvous.is_leader else [],
        lambda rows: rows[0],
    )
    return [row, *space]


def _check_devices(rendezvous: Rendezvous, workers: Workers) -> list[Row]:
    stage, deadline = "looking at the devices", rendezvous.deadline - MARGIN_SECONDS
    return rendezvous.run_stage(
        stage,
        lambda: workers.wait_for_reports("device", stage, deadline),
        lambda found: devices.check_devices(found, rendezvous.names, rendezvous.info.ranks_per_node),
    )


def _check_hardware(rendezvous: Rendezvous, job: Job) -> list[Row]:
    if not job.is_on_cpu:  # so that a tool can hang until its timeout and still be reported
        rendezvous.extend_deadline(rendezvous.deadline - time.monotonic() + hardware.COMMAND_SECONDS)
    return rendezvous.run_stage(
        "looking for faulty GPUs and links",
        lambda: hardware.collect(job.is_on_cpu, rendezvous.info.num_nodes),
        lambda found: hardware.check(found, rendezvous.names),
    )


def _measure_bandwidth(rendezvous: Rendezvous, workers: Workers, job: Job) -> list[Row]:
    stage, deadline = "measuring bandwidth", rendezvous.deadline - MARGIN_SECONDS

    def collect() -> list[bandwidth_advice.WorkerRates]:
        if rendezvous.is_leader:
            workers.start_measuring(max(1.0, deadline - time.monotonic() - MARGIN_SECONDS))
        return workers.wait_for_reports("rates", stage, deadline)

    return rendezvous.run_stage(
        stage,
        collect,
        lambda rates: bandwidth_advice.describe(
            job.config, job.recipe, rates, rendezvous.names, rendezvous.info.ranks_per_node
        ),
    )


def find_node(
    num_nodes: int | None, node_rank: int | None, ranks_per_node: int, master_address: str | None, master_port: int
) -> ParticipantInfo | None:
    """Describe this node from the flags or, without flags, from the launcher's environment variables.

    A launcher starts a process for each rank, but only local rank 0 checks the node; the others get None.
    Raises a PreflightError if a flag or variable is missing.
    """
    if num_nodes is not None or node_rank is not None or "WORLD_SIZE" not in os.environ:
        num_nodes = num_nodes or 1
        if num_nodes > 1 and (node_rank is None or master_address is None):
            raise PreflightError(
                f"--num-nodes {num_nodes} also needs --node-rank and --master-addr; pass both on every node."
            )
        return ParticipantInfo(node_rank or 0, num_nodes, ranks_per_node, master_address or "127.0.0.1", master_port)
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise PreflightError(
            f"WORLD_SIZE is set but {', '.join(missing)} is not. Start the preflight with torchrun or accelerate launch, or "
            f"pass --num-nodes, --node-rank, --nproc-per-node, --master-addr and --master-port."
        )
    if os.environ["LOCAL_RANK"] != "0":
        return None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return ParticipantInfo(rank // ranks_per_node, world_size // ranks_per_node, ranks_per_node, address, port)
