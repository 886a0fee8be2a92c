"""Finds out in seconds whether the nodes of a job can work together, and names the culprit where they cannot.

    hf-fsdp preflight --num-nodes 2 --node-rank $SLURM_NODEID --nproc-per-node 8 --master-addr nodea --master-port 29500

once on every node, or without these flags under a launcher: `torchrun ... -m hf_fsdp_recipes.tools.preflight.preflight`,
`accelerate launch ... -m hf_fsdp_recipes.tools.preflight.preflight`. Node 0 prints the table; all nodes report the same error.
Runs the stages and prints; what is checked is in the neighbouring modules. Imports no torch before its last stage.
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hf_fsdp_recipes.checkpointing import disk_estimate
from hf_fsdp_recipes.configs import validate
from hf_fsdp_recipes.errors import PreflightError, RecipeError, TemplateError
from hf_fsdp_recipes.tools.preflight import addresses, bandwidth_advice, devices, node_info, output_directory, rollcall
from hf_fsdp_recipes.tools.preflight.rendezvous import Meeting, Seat, StoreMeeting
from hf_fsdp_recipes.tools.preflight.workers import Workers

MIN_CHECK_SECONDS = 30.0  # for what follows the roll call, however short the wait for that is
MARGIN_SECONDS = 3.0  # a process that hangs is given up so much before the others stop waiting for its node
LAST_WORDS_SECONDS = 1.0


@dataclass
class Job:
    """What a preflight is about.

    Attributes:
        template, recipe: their files, if given; `config` and `wishes` are what they hold.
        output_dir: where the run will write, if known.
    """

    template: Path | None
    recipe: Path | None
    output_dir: Path | None

    def __post_init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.wishes: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        """Read the files and return this node's facts.

        Raises:
            PreflightError: a file cannot be read or is not YAML.
        """
        facts = node_info.collect([file for file in (self.template, self.recipe) if file is not None])
        try:
            if self.template is not None:
                self.config = validate.read_config(self.template)
            if self.recipe is not None:
                self.wishes = validate.read_config(self.recipe)
        except TemplateError as error:
            raise PreflightError(str(error)) from error
        if self.output_dir is None and self.wishes is not None and self.wishes.get("output_dir"):
            self.output_dir = Path(self.wishes["output_dir"])
        return facts

    @property
    def is_on_cpu(self) -> bool:
        """Whether the ranks are to be CPU ranks on a machine that may have more."""
        return any(
            validate.is_true(flag)
            for flag in (self.config.get("use_cpu", False), os.environ.get("ACCELERATE_USE_CPU", "false"))
        )


def run(seat: Seat, job: Job, timeout_seconds: float) -> list[str]:
    """Check everything; return the table and the warnings at number 0, nothing elsewhere.

    Collective: every participant must call this.

    Raises:
        PreflightError: the first stage that failed, with all its faults, the same at every participant that was reached.
    """
    started = time.monotonic()
    meeting = _meet(seat, timeout_seconds)
    try:
        meeting.extend(max(timeout_seconds, MIN_CHECK_SECONDS))
        lines = [*_describe_roll(meeting)]
        lines += _check_software(meeting, job)
        with Workers(seat, job.is_on_cpu) as workers:
            lines += _check_output(meeting, job)
            lines += _check_devices(meeting, job, workers)
    finally:
        meeting.close()
    passed = f"preflight passed in {time.monotonic() - started:.1f} s"
    ordered = sorted(lines, key=lambda line: line.startswith("warning: "))
    return [*ordered, passed] if seat.number == 0 else []


def _meet(seat: Seat, timeout_seconds: float) -> Meeting:
    if seat.kind == "rank" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        meeting = StoreMeeting(seat, timeout_seconds)  # the launcher's agent listens on the master port already
        meeting.call_roll()
        return meeting
    return rollcall.meet(seat, timeout_seconds)


def _describe_roll(meeting: Meeting) -> list[str]:
    seat = meeting.seat
    found = addresses.resolve(seat.master_address)
    address = (
        seat.master_address if seat.master_address in found or not found else f"{seat.master_address} ({found[0]})"
    )
    return [
        f"{seat.kind + 's':<10}{', '.join(meeting.names)}",
        f"{'master':<10}{address} port {seat.master_port}",
    ]


def _check_software(meeting: Meeting, job: Job) -> list[str]:
    seat = meeting.seat

    def judge(facts: list[dict[str, Any]]) -> list[str]:
        node_info.check_alike(facts, meeting.names)
        node_info.check_names(facts, meeting.names)
        lines = node_info.describe(facts)
        warnings = node_info.find_warnings(facts, meeting.names, _num_nodes(seat) * seat.ranks_per_node)
        if job.template is not None:
            launched = bandwidth_advice.as_launched(job.config, _num_nodes(seat), seat.ranks_per_node)
            warnings += [f"{job.template.name}: {fault}" for fault in validate.find_faults(launched)]
        return lines + [f"warning: {warning}" for warning in warnings]

    return meeting.settle("comparing versions, code and files", job.read, judge)


def _num_nodes(seat: Seat) -> int:
    return seat.count if seat.kind == "node" else seat.count // seat.ranks_per_node


def _check_output(meeting: Meeting, job: Job) -> list[str]:
    directory, seat = job.output_dir, meeting.seat
    nonce = meeting.settle("starting", lambda: None, lambda _: secrets.token_hex(4))
    if directory is None:
        return [f"{'output':<10}not checked: neither --output-dir nor an output_dir in the recipe"]
    leads = 0 in seat.local_ranks  # one process a node looks at the directory

    def judge_written(written: list[dict[str, Any] | None]) -> list[str]:
        return output_directory.describe(directory, *_of_leads(written, meeting.names))

    def judge_seen(unseen: list[list[int] | None]) -> None:
        output_directory.check_shared(directory, *_of_leads(unseen, meeting.names))

    def find_unseen() -> list[int] | None:
        return output_directory.find_unseen(directory, nonce, _num_nodes(seat)) if leads else None

    try:
        lines = meeting.settle(
            "writing into the output directory",
            lambda: output_directory.write_token(directory, nonce, seat.node) if leads else None,
            judge_written,
        )
        meeting.settle("looking for the others' files in the output directory", find_unseen, judge_seen)
    finally:
        if leads:
            output_directory.remove_token(directory, nonce, seat.node)
    if job.wishes is not None:
        lines += meeting.settle(
            "estimating what the run will write",
            lambda: _check_space(directory, job.wishes or {}) if seat.number == 0 else None,
            lambda found: found[0],
        )
    return lines


def _of_leads(values: list[Any], names: list[str]) -> tuple[list[Any], list[str]]:
    """Return the values of the processes that spoke for their nodes, and their names; in the order of nodes."""
    spoken = [(value, name) for value, name in zip(values, names, strict=True) if value is not None]
    return [value for value, _ in spoken], [name for _, name in spoken]


def _check_space(directory: Path, wishes: dict[str, Any]) -> list[str]:
    try:
        need = disk_estimate.estimate(wishes)
    except Exception as error:  # any model's code runs here, and an estimate stops no job
        return [f"warning: what the run will write is not estimated: {error}"]
    return [f"{'space':<10}{output_directory.check_space(directory, need)}"]


def _check_devices(meeting: Meeting, job: Job, workers: Workers) -> list[str]:
    seat = meeting.seat

    def look() -> list[dict[str, Any]]:
        until = meeting.deadline - MARGIN_SECONDS
        return workers.read("looking at its device", until, lambda: meeting.is_over("looking at the devices"))

    def judge_devices(found: list[list[dict[str, Any]]]) -> dict[str, Any]:
        devices.check(found, meeting.names, seat.ranks_per_node)
        return {"lines": devices.describe(found, meeting.names), "place": workers.place}

    def measure() -> list[dict[str, Any]]:
        left_seconds = meeting.deadline - time.monotonic() - MARGIN_SECONDS
        workers.measure(verdict["place"], max(1.0, left_seconds - MARGIN_SECONDS))
        until = time.monotonic() + left_seconds
        return workers.read("measuring bandwidth", until, lambda: meeting.is_over("measuring bandwidth"))

    def judge_rates(results: list[list[dict[str, Any]]]) -> list[str]:
        return bandwidth_advice.describe(
            job.config, job.wishes, results, meeting.names, _num_nodes(seat), seat.ranks_per_node
        )

    verdict = meeting.settle(
        "looking at the devices",
        look,
        judge_devices,
    )
    return verdict["lines"] + meeting.settle("measuring bandwidth", measure, judge_rates)


def seat_from_launcher(environment: Mapping[str, str]) -> Seat:
    """Return the seat of a rank that a launcher started.

    Raises:
        PreflightError: the launcher's variables are incomplete.
    """
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise PreflightError(
            f"WORLD_SIZE is set and {', '.join(missing)} not. Rule: launchers set all. Remedy: torchrun or accelerate launch, "
            f"or --num-nodes, --node-rank, --nproc-per-node, --master-addr and --master-port."
        )
    world_size, rank, local_rank = (int(environment[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    per_node = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    node = int(environment.get("GROUP_RANK", rank // per_node))
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return Seat("rank", rank, world_size, address, port, node, (local_rank,), per_node)


def command(
    num_nodes: Annotated[Optional[int], typer.Option(min=1, help="How many nodes the job has.")] = None,
    node_rank: Annotated[Optional[int], typer.Option(help="This node's number, from 0.")] = None,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks a node.")] = 1,
    master_addr: Annotated[Optional[str], typer.Option(help="Name or address of node 0.")] = None,
    master_port: Annotated[int, typer.Option(help="Port of node 0 that the job will use.")] = 29500,
    template: Annotated[Optional[Path], typer.Option(help="The Accelerate config of the job.")] = None,
    config: Annotated[Optional[Path], typer.Option(help="The recipe of the job.")] = None,
    output_dir: Annotated[Optional[Path], typer.Option(help="Where it writes; default: the recipe's.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for all nodes to come.")] = 60.0,
) -> None:
    """Check that the nodes of a job can work together; one process a node, or every rank under a launcher."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its own processes end with it
    if num_nodes is None and node_rank is None and "WORLD_SIZE" in os.environ:
        seat = seat_from_launcher(os.environ)
    else:
        count = num_nodes or 1
        if count > 1 and (node_rank is None or master_addr is None):
            raise PreflightError(
                f"--num-nodes {count} without --node-rank and --master-addr. Remedy: give both on every node."
            )
        number = node_rank or 0
        local_ranks = tuple(range(nproc_per_node))
        seat = Seat("node", number, count, master_addr or "127.0.0.1", master_port, number, local_ranks, nproc_per_node)
    for line in run(seat, Job(template, config, output_dir), timeout):
        print(line, flush=True)


def main() -> None:
    """Run the command as a module, under a launcher; an error is said once a node."""
    try:
        typer.run(command)
    except RecipeError as error:
        if error.is_agreed and os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(LAST_WORDS_SECONDS)  # the launcher ends all ranks when one leaves; let local rank 0 speak
        else:
            os.write(sys.stderr.fileno(), f"{type(error).__name__}: {error}\n".encode())
        sys.exit(1)


if __name__ == "__main__":
    main()
