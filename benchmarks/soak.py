"""Kills runs at random moments, resumes them, and compares each result with an uninterrupted run, bit for bit.

    make soak KILLS=1000 DISK=runs/soak TMPFS=/dev/shm/hf-fsdp-soak SEED=0

Every case is a run of recipes/sft.py on forked gloo ranks: full or LoRA, FSDP2 or FSDP1, 2 or 3 ranks, on disk or tmpfs. It
saves every step or two and exports at the end. It is killed several times, after a random time or at a random file operation,
and resumed with `auto`; then it runs to its end. After each kill the run must resume from the last complete checkpoint or a
later one, and no rank may hang. In the end losses and export must equal the uninterrupted run's.

Prints the counts and writes them to <DISK>/soak.json. After a violation the exit status is 1, and the case's directory and
logs are kept. `--case 17` with the same seed repeats one case; exact timing still varies, so repeat it a few times.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import soak_ranks
from benchmarks.soak_ranks import COLLECTIVE_TIMEOUT_SECONDS, NOT_TRAINING, PHASES, Board, Processes, Trap

NUM_STEPS = 12
KINDS = ("all ranks", "one rank", "one rank, torchrun stops the others", "launcher", "launcher, ranks go on")
TRAPS = ("staging", "writing", "commit", "deleting", "export", "export rename", "after export")
ONCE = ("export", "export rename", "after export")  # phases that do not recur with every save
HANG_SECONDS = 120  # time limit for surviving ranks; torch tries twice to reach a rank 0 that died before it listened
RUN_SECONDS = 240  # a run that is not killed must end within this time; waiting for the lock can take 60 s
ORPHAN_SECONDS = 3.0  # the longest time that ranks without a launcher run alongside the next run
POLL_SECONDS = 0.002
SETTINGS = {
    "max_steps": NUM_STEPS,
    "save_total_limit": 3,
    "logging_steps": 1,
    "per_device_train_batch_size": 1,
    "learning_rate": 1.0e-2,
    "max_length": 32,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "report": False,
    "report_to": "none",
    "ddp_timeout": COLLECTIVE_TIMEOUT_SECONDS,
    "resume_from_checkpoint": "auto",
}
LORA = {
    "use_peft": True,
    "lora_r": 4,  # with three ranks, one rank holds no row of an adapter
    "lora_dropout": 0.1,  # a resumed run must restore the random state
    "lora_target_modules": "all-linear",
}


class Cell(NamedTuple):
    """One combination of the matrix."""

    place: str
    method: str
    fsdp: str
    num_ranks: int


CELLS = [Cell(*cell) for cell in itertools.product(("tmpfs", "disk"), ("full", "lora"), ("fsdp2", "fsdp1"), (2, 3))]


class Result(NamedTuple):
    """The result of a complete run: (step, loss) of every step, and the contents of the export's files."""

    losses: list[tuple[int, float]]
    export: dict[str, bytes]


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run of a cell."""

    result: Result
    names: set[str]  # all names in the output directory
    num_events: list[list[int]]  # file operations of each rank in each phase, with a save at every step
    seconds: tuple[float, float, float]  # loading, training, exporting


class Kill(NamedTuple):
    """When and how to kill an attempt: after some seconds, or at a file operation."""

    kind: str
    seconds: float
    trap: Trap | None
    victim: int

    def is_due(self, board: Board, seconds: float) -> bool:
        if self.trap is None:
            return seconds >= self.seconds
        return board.ranks[self.trap.rank].trapped_in != NOT_TRAINING


@dataclass
class Tally:
    """All counts, and the violations."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    leftovers: Counter[str] = field(default_factory=Counter)
    violations: list[dict[str, Any]] = field(default_factory=list)
    num_runs: int = 0
    num_resumes: int = 0


class Violation(Exception):
    """Has two arguments: the broken guarantee, and what happened."""


class Case:
    """One run that is killed and resumed until it is complete."""

    def __init__(self, soak: "Soak", number: int) -> None:
        self.random = random.Random(f"{soak.seed} {number}")
        self.soak, self.number = soak, number
        self.cell = CELLS[number % len(CELLS)]
        self.reference = soak.find_reference(self.cell)
        self.directory = soak.places[self.cell.place] / f"case-{number}"
        self.output = self.directory / "run"
        self.save_steps = self.random.choice((1, 2))
        self.num_attempts = 0
        self.orphans: list[tuple[float, bool, Processes]] = []  # deadline, kill then or report a hang

    def run(self) -> None:
        """Kill and resume until the run is complete; record a violation if there is one."""
        self.directory.mkdir()
        tally = self.soak.tally
        tally.num_runs += 1
        try:
            for _ in range(self.random.randint(2, 7)):
                if not self._attempt(self._plan_kill()):
                    break
            else:
                self._attempt(None)
            self._end_orphans(waits=True)
            self._compare()
        except Violation as violation:
            which, text = violation.args
            where = f"case {self.number} ({', '.join(map(str, self.cell))}), attempt {self.num_attempts}"
            tally.violations.append({"which": which, "where": where, "text": text, "directory": str(self.directory)})
            print(f"VIOLATION, {which}: {where}: {text}. Kept in {self.directory}", flush=True)
        else:
            shutil.rmtree(self.directory)
        finally:
            for _, _, processes in self.orphans:
                processes.end()

    def _plan_kill(self) -> Kill:
        choose, remaining = self.random, 1 - newest_complete(self.output) / NUM_STEPS
        load, train, export = self.reference.seconds
        seconds = choose.uniform(0, load + train * remaining + export)
        trap = None
        if choose.random() < 0.5:
            phase = PHASES.index(choose.choice(TRAPS))
            counts = {rank: of_rank[phase] for rank, of_rank in enumerate(self.reference.num_events) if of_rank[phase]}
            rank = choose.choice(sorted(counts))
            # With a larger share, the trap could be at an operation after the last one of the run.
            share = 1.0 if PHASES[phase] in ONCE else remaining / self.save_steps / 2
            trap = Trap(rank, phase, choose.randint(1, max(1, int(counts[rank] * share))))
        return Kill(choose.choice(KINDS), seconds, trap, choose.randrange(self.cell.num_ranks))

    def _attempt(self, kill: Kill | None) -> bool:
        """Start the run and kill it; return whether it was killed before its end."""
        self.num_attempts += 1
        required = newest_complete(self.output)
        board = soak_ranks.new_board()
        launcher = self.soak.start(self.cell, self.output, self.save_steps, board, self._log(), kill)
        started = time.monotonic()
        leader, ranks = Processes([launcher]), Processes(board.wait_for_pids(self.cell.num_ranks))
        try:
            while not leader.wait(POLL_SECONDS):
                self._end_orphans()
                seconds = time.monotonic() - started
                if kill is not None and kill.is_due(board, seconds):
                    self._kill(kill, board, launcher, leader, ranks)
                    self._check_resume(board, required)
                    return True
                if seconds > RUN_SECONDS:
                    raise Violation("hang", f"no end after {RUN_SECONDS} s without a kill; see {self._log().name}")
            status = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
            self._check_resume(board, required)
            if status:
                raise Violation("unusable resume", f"status {status} without a kill: {find_error(self._log())}")
            return False
        except BaseException:
            ranks.end()
            leader.end()
            raise

    def _kill(self, kill: Kill, board: Board, launcher: int, leader: Processes, ranks: Processes) -> None:
        """Kill as planned. Ranks that survive must end within HANG_SECONDS, unless they may go on."""
        moment = board.moment()
        self.soak.tally.kills[kill.kind, moment] += 1
        self.soak.tally.cells[", ".join(map(str, self.cell))] += 1
        if kill.kind == "all ranks":
            ranks.send(signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):  # if the process has just ended
                os.kill(launcher if "launcher" in kill.kind else board.ranks[kill.victim].pid, signal.SIGKILL)
        board.is_released = 1
        waits_for = ranks if "launcher" in kill.kind else leader
        if kill.kind == "launcher, ranks go on":
            self.orphans.append((time.monotonic() + self.random.uniform(0, ORPHAN_SECONDS), True, ranks))
        elif kill.kind == "launcher" and self.random.random() < 0.5:  # resume while the ranks write their checkpoint
            self.orphans.append((time.monotonic() + HANG_SECONDS, False, ranks))
        elif not waits_for.wait(HANG_SECONDS):
            text = f"{kill.kind} killed during {moment}, the others alive {HANG_SECONDS} s later"
            raise Violation("hang", f"{text}; see {self._log().name}")
        os.waitpid(launcher, 0)

    def _end_orphans(self, waits: bool = False) -> None:
        for orphan in list(self.orphans):
            deadline, is_killed, processes = orphan
            has_ended = processes.wait(max(0.0, deadline - time.monotonic()) if waits else 0)
            if not has_ended and time.monotonic() < deadline:
                continue
            self.orphans.remove(orphan)
            if not has_ended and is_killed:
                processes.send(signal.SIGKILL)
            elif not has_ended:
                processes.end()
                raise Violation("hang", f"ranks are alive {HANG_SECONDS} s after their launcher was killed")

    def _check_resume(self, board: Board, required: int) -> None:
        resumed_from = board.ranks[0].resumed_from
        self.soak.tally.num_resumes += resumed_from > 0
        if NOT_TRAINING < resumed_from < required:
            raise Violation("lost steps", f"resumed from step {resumed_from}, but checkpoint-{required} was complete")

    def _compare(self) -> None:
        """Compare with the uninterrupted run, and count leftover files."""
        found, wanted = read_result(self.output), self.reference.result
        if found.losses != wanted.losses:
            pairs = itertools.zip_longest(found.losses, wanted.losses)
            raise Violation(
                "different losses", "(step, loss) {} instead of {}".format(*next(p for p in pairs if p[0] != p[1]))
            )
        if found.export != wanted.export:
            names = sorted(found.export.keys() | wanted.export.keys())
            different = [name for name in names if found.export.get(name) != wanted.export.get(name)]
            raise Violation("different export", f"{', '.join(different)}")
        extra = [path.name for path in self.output.iterdir() if path.name not in self.reference.names]
        patterns = ["".join("N" if c.isdigit() else c for c in name) for name in extra]
        self.soak.tally.leftovers.update(pattern for pattern in patterns if pattern.strip("N") != "checkpoint-")

    def _log(self) -> Path:
        return self.directory / f"attempt-{self.num_attempts}.log"


class Soak:
    """The prepared model and rows, the uninterrupted runs, and the counts."""

    def __init__(self, places: dict[str, Path], seed: int) -> None:
        self.places, self.seed, self.tally = places, seed, Tally()
        self._references: dict[tuple[str, str, int], Reference] = {}
        self._prepared = places["disk"] / "prepared"
        self._environments = soak_ranks.prepare(self._prepared)

    def start(
        self, cell: Cell, output: Path, save_steps: int, board: Board, log: Path, kill: Kill | None = None
    ) -> int:
        """Start a run, or continue it; return the launcher's process id."""
        environment = dict(self._environments[cell.fsdp])
        if kill is None or kill.kind != "launcher, ranks go on":
            environment["TORCHELASTIC_RUN_ID"] = "none"  # as torchrun sets it: ranks end with their launcher
        settings = SETTINGS | {
            "model_name_or_path": self._prepared / "model", "dataset_name": self._prepared / "rows.jsonl",
            "output_dir": output, "save_steps": save_steps, **(LORA if cell.method == "lora" else {}),
        }  # fmt: skip
        arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        trap, stops_others = (kill.trap, "torchrun" in kill.kind) if kill is not None else (None, False)
        return soak_ranks.start_launcher(
            board, cell.num_ranks, environment, arguments, log, stops_others=stops_others, trap=trap
        )

    def find_reference(self, cell: Cell) -> Reference:
        """Return the uninterrupted run of a cell. One run on tmpfs serves both places."""
        if cell[1:] not in self._references:
            if not self._references:
                self._run_reference(cell)  # untimed: only the first run fills the cache of rows
            self._references[cell[1:]] = self._run_reference(cell)
        return self._references[cell[1:]]

    def _run_reference(self, cell: Cell) -> Reference:
        directory = self.places["tmpfs"] / "reference"
        directory.mkdir()
        board = soak_ranks.new_board()
        started = time.monotonic()
        launcher = self.start(cell, directory / "run", 1, board, directory / "log")
        if os.waitpid(launcher, 0)[1]:
            sys.exit(f"the uninterrupted run failed:\n{(directory / 'log').read_text()}")
        load, train = board.ranks[0].seconds_loading, board.ranks[0].seconds_training
        reference = Reference(
            read_result(directory / "run"),
            {path.name for path in (directory / "run").iterdir()},
            [list(of_rank.num_events) for of_rank in board.ranks[: cell.num_ranks]],
            (load, train, time.monotonic() - started - load - train),
        )
        shutil.rmtree(directory)
        return reference


def newest_complete(output: Path) -> int:
    """Return the newest step whose checkpoint has its final name and every file of its manifest, or 0."""
    found = [0]
    for directory in output.glob("checkpoint-*"):
        try:
            files = json.loads((directory / "manifest.json").read_text())["files"]
            if all((directory / name).stat().st_size == entry["bytes"] for name, entry in files.items()):
                found.append(int(directory.name.removeprefix("checkpoint-")))
        except (OSError, ValueError):
            continue  # being deleted, or set aside
    return max(found)


def read_result(output: Path) -> Result:
    """Read the losses from the last checkpoint's log, and the export."""
    state = output / f"checkpoint-{newest_complete(output)}" / "trainer_state.json"
    log = json.loads(state.read_text())["log_history"] if state.is_file() else []
    export = {path.name: path.read_bytes() for path in (output / "export").glob("*")}
    return Result([(entry["step"], entry["loss"]) for entry in log if "loss" in entry], export)


def find_error(log: Path) -> str:
    """Return the last line that names an error, or else the last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])


def summarize(soak: Soak, seconds: float) -> dict[str, Any]:
    """Return all counts, ready for JSON."""
    from benchmarks.running import machine

    tally = soak.tally
    num_kills, used = tally.kills.total(), resource.getrusage(resource.RUSAGE_CHILDREN)
    which = Counter(violation["which"] for violation in tally.violations)
    return {
        "kills": num_kills,
        "runs": tally.num_runs,
        "resumes": tally.num_resumes,
        "by_kind": {kind: sum(n for key, n in tally.kills.items() if key[0] == kind) for kind in KINDS},
        "by_moment": {moment: sum(n for key, n in tally.kills.items() if key[1] == moment) for moment in PHASES},
        "by_cell": dict(sorted(tally.cells.items())),
        "unusable_resumes": which["unusable resume"],
        "lost_steps": which["lost steps"],
        "different_results": which["different losses"] + which["different export"],
        "hangs": which["hang"],
        "leftovers": dict(tally.leftovers),
        "violations": tally.violations,
        "seconds": round(seconds, 1),
        "seconds_per_kill": round(seconds / max(1, num_kills), 2),
        # The operating system counts only reaped processes.
        "cpu_seconds_per_kill": round((used.ru_utime + used.ru_stime) / max(1, num_kills), 2),
        "seed": soak.seed,
        "machine": machine(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="minimum number of kills")
    parser.add_argument("--disk", type=Path, default=Path("runs/soak"), help="a new directory on a disk")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm/hf-fsdp-soak"), help="a new directory on a tmpfs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, default=None, help="repeat this case alone")
    options = parser.parse_args(argv)
    places = {"disk": options.disk.resolve(), "tmpfs": options.tmpfs.resolve()}
    for place in places.values():
        if place.exists():
            sys.exit(f"{place} exists. Choose a new directory, or delete it.")
        place.mkdir(parents=True)
    soak = Soak(places, options.seed)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interrupted soak ends its ranks and reports
    with contextlib.suppress(KeyboardInterrupt):
        for number in itertools.count() if options.case is None else [options.case]:
            Case(soak, number).run()
            tally, seconds = soak.tally, time.monotonic() - started
            counts = f"{tally.num_runs} runs, {tally.kills.total()} kills, {len(tally.violations)} violations"
            print(f"{counts}, {seconds:.0f} s", flush=True)
            if tally.kills.total() >= options.kills:
                break
    summary = summarize(soak, time.monotonic() - started)
    (places["disk"] / "soak.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    if summary["violations"]:
        sys.exit(1)  # keeps the model and rows of the failed cases too
    shutil.rmtree(places["tmpfs"])
    shutil.rmtree(places["disk"] / "prepared")


if __name__ == "__main__":
    main()
