"""The fuzzer's command line."""

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tests.conftest  # sets variables for CPU ranks
import tests.fuzz
from tests.fuzz.combinations import OPTIONS, Case, read_cases
from tests.fuzz.drawing import draw
from tests.fuzz.driver import TIMEOUT_SECONDS, Fuzzer
from tests.fuzz.results import Result, read_results, result_of, summary, write_result
from tests.fuzz.shrinking import Shrinker

SHRINK_SECONDS = 120.0
NUM_SHRUNK = 2  # of each class
DEFAULT_CASES = 100


def parser() -> argparse.ArgumentParser:
    options = [f"  {name:12} {text}" for name, text in OPTIONS.items()]
    found = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=tests.fuzz.__doc__,
        epilog="\n".join(["options of a combination, besides TrainingArguments:", *options]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--seed", type=int, default=1, help="seed of the first combination; the next has seed + 1")
    add("--cases", type=int, help=f"how many are drawn, by default {DEFAULT_CASES}")
    add("--minutes", type=float, help="draw combinations for so long")
    add("--jobs", type=int, default=1, help="combinations that run at the same time")
    add("--list", type=Path, help="file with a combination in each line")
    add("--replay", type=json.loads, help="a combination as JSON: all of its differences")
    add("--minimize", action="store_true", help="with --replay, also find the smallest combination")
    add("--results", type=Path, help="file to which results are appended")
    add("--summary", type=Path, help="only print the classes of a results file")
    add("--work", type=Path, help="a directory, best in memory")
    add("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds for a session")
    return found


class Campaign:
    """Runs combinations, and prints those that differ.

    Args:
        fuzzer: runs a combination.
        cases: the combinations, each with its source.
        results: file to which results are appended.
        deadline: when no further combination begins, as `time.monotonic()`.
    """

    def __init__(
        self,
        fuzzer: Fuzzer,
        cases: Iterator[tuple[str, Case]],
        results: Path | None,
        deadline: float,
    ) -> None:
        self._fuzzer = fuzzer
        self._cases = cases
        self._results = results
        self._deadline = deadline
        self._lock = threading.Lock()
        self._shrunk = Counter[str]()
        self.found: list[Result] = []

    def run(self, num_jobs: int) -> None:
        """Run all combinations, several at a time."""
        with ThreadPoolExecutor(num_jobs) as pool:
            jobs = [pool.submit(self._run_some) for _ in range(num_jobs)]
        for job in jobs:
            job.result()

    def _run_some(self) -> None:
        while time.monotonic() < self._deadline:
            with self._lock:
                source, case = next(self._cases, (None, None))
            if case is None:
                return
            self._note(self._run_case(source, case))

    def _run_case(self, source: str, case: Case) -> Result:
        begin = time.monotonic()
        differences = self._fuzzer.run(case)
        result = result_of(source, case, differences, time.monotonic() - begin)
        with self._lock:
            self._shrunk[result.group] += 1
        if result.differences and self._shrunk[result.group] <= NUM_SHRUNK:
            shrinker = Shrinker(self._fuzzer, result.differences[0].kind, SHRINK_SECONDS)
            shrinker.shrink(case)
            result.smallest = shrinker.case or None
        return result

    def _note(self, result: Result) -> None:
        with self._lock:
            self.found.append(result)
            if self._results is not None:
                write_result(result, self._results)
            if result.differences:
                print(result, flush=True)


def cases_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Yield the combinations of --list, then those that are drawn, each with its source."""
    num_cases = arguments.cases
    if arguments.list is not None:
        num_cases = num_cases or 0
        for number, case in enumerate(read_cases(arguments.list.read_text()), 1):
            yield f"{arguments.list.name} {number}", case
    if arguments.minutes is None:
        num_cases = DEFAULT_CASES if num_cases is None else num_cases
    seeds = itertools.count(arguments.seed)
    for seed in itertools.islice(seeds, num_cases):
        yield f"seed {seed}", draw(seed)


def replay(fuzzer: Fuzzer, case: Case, must_shrink: bool) -> bool:
    """Print all differences of a combination. Return whether one is not announced."""
    result = result_of("replay", case, fuzzer.run(case), 0.0)
    if must_shrink and result.differences:
        shrinker = Shrinker(fuzzer, result.differences[0].kind, SHRINK_SECONDS)
        shrinker.shrink(case)
        result.case = shrinker.case
        result.differences = shrinker.differences
        print(json.dumps(result.case))
    for found in result.differences:
        print(f"{found.kind} ({found.call})\n    stock: {found.stock}\n    ours:  {found.ours}")
    print("\n".join(f"announced: {sentence}" for sentence in result.announced))
    print(result.group)
    return bool(result.differences)


def run_campaign(fuzzer: Fuzzer, arguments: argparse.Namespace) -> bool:
    """Run all combinations and print the classes. Return whether a difference is not announced."""
    begin = time.monotonic()
    minutes = float("inf") if arguments.minutes is None else arguments.minutes
    deadline = begin + 60 * minutes
    campaign = Campaign(fuzzer, cases_of(arguments), arguments.results, deadline)
    campaign.run(arguments.jobs)
    print(summary(campaign.found))
    print(f"{time.monotonic() - begin:.0f} s")
    return any(result.differences for result in campaign.found)


def main() -> int:
    arguments = parser().parse_args()
    if arguments.summary is not None:
        print(summary(read_results(arguments.summary)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        fuzzer = Fuzzer(arguments.work or Path(temporary), arguments.timeout)
        if arguments.replay is not None:
            return int(replay(fuzzer, arguments.replay, arguments.minimize))
        return int(run_campaign(fuzzer, arguments))


if __name__ == "__main__":
    sys.exit(main())
