"""Kills runs at random moments and resumes them.

Each result is compared with that of an uninterrupted run, bit for bit.

    make soak KILLS=1000 DISK=runs/soak SEED=0

A case is a tiny run, full or LoRA, on disk or in memory (/dev/shm): on forked gloo ranks under FSDP
or DDP, or in one process without a process group. It saves every step, and the last step of an
epoch twice; a callback adds a file to each checkpoint. It is killed several times, at a random time
or file operation: all ranks, one rank (by SIGKILL or SIGTERM), or the launcher. After each kill
every checkpoint must be intact, and none may be lost. In the end losses, weights and optimizer must
equal the uninterrupted run's.

A mutation damages a checkpoint at random, or forges it to run code. It must be refused, or must not
change the resumed run.

Prints the counts and writes them to <DISK>/soak.json. After a violation the exit status is 1, and
the case's directory is kept.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak_ranks import NOTE, Board, extend_saves, prepare, start_launcher

NUM_STEPS = 6
NUM_ROWS = 24  # of each step; an epoch has two steps
SETTINGS = {
    "max_steps": NUM_STEPS,
    "save_steps": 1,
    "save_total_limit": 2,
    "prepare": extend_saves,
}
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"sft": True, "lora": True}}
WORLDS = (("fsdp", 2), ("ddp", 2), ("one process", 1), ("fsdp", 3))
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
# What a launcher sets, and what is missing without one.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HANG_SECONDS = 120  # survivors, and a run that is not killed, must end within this time


class Violation(Exception): ...


@dataclass(frozen=True)
class Kind:
    """What a run trains, and on which ranks."""

    method: str
    world: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.method}, {self.world}, {self.num_ranks} ranks"

    def options(self) -> dict[str, Any]:
        """Return the options of the run."""
        num_rows_of_rank = NUM_ROWS // self.num_ranks
        return SETTINGS | METHODS[self.method] | {"per_device_train_batch_size": num_rows_of_rank}

    def environment(self) -> Mapping[str, str | None]:
        """Return the environment of the ranks. What is None is not set."""
        from tests.ranks.harness import FSDP2, fsdp_environment

        if self.world == "fsdp":
            return fsdp_environment(FSDP2)
        if self.world == "ddp":
            return ON_CPU
        return ON_CPU | dict.fromkeys(LAUNCHER)


KINDS = [
    Kind(method, world, num_ranks)
    for method, (world, num_ranks) in itertools.product(METHODS, WORLDS)
]
CELLS = [(kind, place) for place, kind in itertools.product(("memory", "disk"), KINDS)]


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run."""

    output: Path
    result: dict[str, Any]
    num_events: list[int]  # file operations of each rank
    seconds: float


class Soak:
    """The uninterrupted runs, and the counts."""

    def __init__(self, disk: Path, seed: int) -> None:
        self.disk = disk
        self.seed = seed
        self.counts = Counter[str]()
        self.violations: list[str] = []
        self._references: dict[Kind, Reference] = {}

    def finish(self, kind: Kind, output: Path, board: Board) -> dict[str, Any] | None:
        """Run to the end; return the result of rank 0, or None if the run fails."""
        launcher = start(kind, output, board)
        if _wait({launcher}, board.wait_for_pids(kind.num_ranks))[launcher]:
            return None
        return json.loads((output.parent / "result-0.json").read_text())

    def reference(self, kind: Kind) -> Reference:
        """Return the uninterrupted run of a kind."""
        if kind not in self._references:
            directory = self.disk / f"reference {kind}".replace(", ", "-").replace(" ", "-")
            directory.mkdir()
            board = Board()
            started = time.monotonic()
            result = self.finish(kind, directory / "run", board)
            if result is None:
                sys.exit(f"the uninterrupted run failed; see {directory / 'log'}")
            num_events = list(board.num_events[: kind.num_ranks])
            seconds = time.monotonic() - started
            self._references[kind] = Reference(directory / "run", result, num_events, seconds)
        return self._references[kind]

    def run_case(self, number: int) -> None:
        """Kill a run several times, and let it end; record a violation if there is one."""
        choose = random.Random(f"{self.seed} {number}")
        kind, place = CELLS[number % len(CELLS)]
        directory = Path(
            tempfile.mkdtemp(prefix="soak-", dir="/dev/shm" if place == "memory" else self.disk)
        )
        output = directory / "run"
        latest = 0
        try:
            for _ in range(choose.randint(2, 6)):
                published = self._kill(choose, kind, output, 1 - latest / NUM_STEPS)
                latest = check_checkpoints(output, max(latest, published))
            result = self.finish(kind, output, Board())
            self.check_result(result, kind, latest)
            check_checkpoints(output, NUM_STEPS)
            left = [path.name for path in output.iterdir() if path.name.startswith("_")]
            if left:  # a kill before the last deletion leaves one checkpoint more than the limit
                raise Violation(f"the run left {left}")
            shutil.rmtree(directory)
        except Violation as violation:
            self.report(f"case {number} ({kind}, {place}): {violation}; see {directory}")

    def _kill(self, choose: random.Random, kind: Kind, output: Path, remaining: float) -> int:
        """Start a run, or continue it, and kill it. `remaining` is its share that is to come.

        Return the step of the latest checkpoint that it has published, or 0.
        """
        reference = self.reference(kind)
        victim = choose.choice(("all ranks", "one rank", "launcher", "one rank, by SIGTERM"))
        rank = choose.randrange(kind.num_ranks)
        has_trap = choose.random() < 0.6
        board = Board()
        deadline = time.monotonic() + HANG_SECONDS
        if has_trap:
            num_events = int(reference.num_events[rank] * remaining)
            board.trap = (rank, choose.randint(1, 1 + num_events))
        else:
            deadline = time.monotonic() + choose.uniform(0.2, reference.seconds)
        launcher = start(kind, output, board)
        pids = board.wait_for_pids(kind.num_ranks)
        has_ended = None
        while not (board.state[0] or has_ended) and time.monotonic() < deadline:
            time.sleep(0.001)
            has_ended = os.waitid(os.P_PID, launcher, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        is_writing = any(output.glob("_saving/checkpoint-*"))
        for pid in {"all ranks": pids, "launcher": {launcher}}.get(victim, {board.pids[rank]}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if victim.endswith("SIGTERM") else signal.SIGKILL)
        board.state[1] = 1
        if has_ended:
            self.counts.update(["runs that ended before the kill"])
        else:
            self.counts.update(["kills", f"kills of {victim}", f"kills under {kind.world}"])
        if is_writing:
            self.counts.update(["kills while a checkpoint was written"])
        _wait({launcher}, pids)
        _wait(pids, pids)  # if the launcher is dead, they are children of this process
        return board.published[0]

    def check_result(self, result: dict[str, Any] | None, kind: Kind, step: int) -> None:
        """Raise a Violation if a run is not as it should be.

        It has failed, was resumed at another step, or has another result than the uninterrupted
        one.
        """
        from hf_fsdp_recipes.saving.directory import step_of

        if result is None:
            raise Violation("the resumed run failed")
        self.counts["resumed runs"] += step > 0
        found = step_of(Path(result["resumed"])) if result["resumed"] else 0
        if found != step:
            raise Violation(f"resumed at step {found} instead of {step}")
        wanted = self.reference(kind).result
        for key in ("losses", "weights", "optimizer"):
            if result[key] != wanted[key]:
                raise Violation(f"{key}: {result[key]} instead of {wanted[key]}")

    def report(self, violation: str) -> None:
        self.violations.append(violation)
        print(f"VIOLATION: {violation}", flush=True)

    def mutate(self, number: int) -> None:
        """Damage a checkpoint.

        Record a violation if that is not noticed and changes the result, or if code runs.
        """
        from hf_fsdp_recipes.saving.resume import find_damage
        from tests.saving.damage import ACCIDENTS, ATTACKS, ATTACKS_ON_TRAINER, damage, forge

        choose = random.Random(f"{self.seed} mutation {number}")
        kind = KINDS[number % len(KINDS)]
        directory = self.disk / f"mutation-{number}"
        shutil.copytree(self.reference(kind).output, directory / "run")
        shutil.rmtree(directory / "run" / f"checkpoint-{NUM_STEPS}")
        checkpoint = directory / "run" / f"checkpoint-{NUM_STEPS - 1}"
        attacks = ATTACKS if kind.world == "fsdp" else ATTACKS_ON_TRAINER
        way = choose.choice((*ACCIDENTS * 4, *attacks))
        if way in attacks:
            forge(way, checkpoint, directory / "canary")
        else:
            damage(
                choose.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file())),
                way,
                choose,
            )
        outcome = "refused"
        try:
            if find_damage(checkpoint) is None:
                result = self.finish(kind, directory / "run", Board())
                outcome = "without effect" if result else f"that end the resumed run, {way}"
                if result:
                    self.check_result(result, kind, NUM_STEPS - 1)
            if (directory / "canary").exists():
                raise Violation("code from the checkpoint ran")
            shutil.rmtree(directory)
        except Violation as violation:
            self.report(f"mutation {number} ({kind}, {way}): {violation}; see {directory}")
        self.counts.update(["mutations", f"mutations {outcome}"])


def start(kind: Kind, output: Path, board: Board) -> int:
    """Start a run, or continue it; return the launcher's process id."""
    return start_launcher(board, kind.num_ranks, kind.environment(), output, kind.options())


def check_checkpoints(output: Path, required: int) -> int:
    """Return the latest checkpoint's step.

    Raise a Violation if a checkpoint is damaged or lacks the callback's file, or the required one
    is lost.
    """
    from hf_fsdp_recipes.saving.directory import list_checkpoints, step_of
    from hf_fsdp_recipes.saving.resume import find_damage

    found = list_checkpoints(output)
    for checkpoint in found:
        damage = find_damage(checkpoint)
        if damage:
            raise Violation(f"{checkpoint.name} is incomplete: {damage}")
        if (checkpoint / NOTE).read_text() != str(step_of(checkpoint)):
            raise Violation(f"{checkpoint.name} has a callback's file of another step")
    latest = max(map(step_of, found), default=0)
    if latest < required:
        raise Violation(f"checkpoint-{required} is lost; the latest is checkpoint-{latest}")
    return latest


def _wait(children: set[int], ranks: set[int]) -> dict[int, int]:
    """Wait for children of this process and return their exit statuses.

    If they do not end, kill them and the ranks.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + HANG_SECONDS
    while children - statuses.keys():
        for pid in children - statuses.keys():
            done = pid
            raw = 0  # unless its launcher has not waited for it
            with contextlib.suppress(ChildProcessError):
                done, raw = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(raw)
        if time.monotonic() > deadline:
            # The first signal shows in the log where a rank hangs.
            for number in (signal.SIGUSR2, signal.SIGKILL):
                for pid in (children | ranks) - statuses.keys():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(1)
            raise Violation(f"processes were alive after {HANG_SECONDS} s")
        time.sleep(0.001)
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mutations", type=int, default=100)
    parser.add_argument(
        "--disk", type=Path, default=Path("runs/soak"), help="a new directory on a disk"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    disk = options.disk.resolve()
    disk.mkdir(parents=True)
    prepare()
    soak = Soak(disk, options.seed)
    started = time.monotonic()
    for number in itertools.count():
        if soak.counts["kills"] >= options.kills:
            break
        soak.run_case(number)
        seconds = time.monotonic() - started
        print(
            f"{dict(soak.counts)}, {len(soak.violations)} violations, {seconds:.0f} s", flush=True
        )
    for number in range(options.mutations):
        soak.mutate(number)
    summary = {
        **dict(sorted(soak.counts.items())),
        "seconds": round(time.monotonic() - started),
        "seed": options.seed,
    }
    summary["violations"] = soak.violations
    (disk / "soak.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    sys.exit(bool(soak.violations))


if __name__ == "__main__":
    main()
