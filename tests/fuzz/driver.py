"""Runs the sessions of a combination, both sides at the same time, and compares them."""

import queue
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz.announced import judge
from tests.fuzz.combinations import WORLDS, Case, Session, complete, sessions
from tests.fuzz.compare import Difference
from tests.fuzz.files import describe
from tests.fuzz.session import RETURNED, Step, run_session
from tests.fuzz.trainers import make_models
from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks, start_ranks

TIMEOUT_SECONDS = 60.0


class Fuzzer:
    """Runs combinations.

    Args:
        work: a directory. Best in memory.
        timeout: seconds after which a session hangs.
    """

    def __init__(self, work: Path, timeout: float = TIMEOUT_SECONDS) -> None:
        self._work = work
        self._timeout = timeout
        common = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        sharded = common | fsdp_environment(FSDP2)
        full = common | fsdp_environment(FSDP2 | {"fsdp_state_dict_type": "FULL_STATE_DICT"})
        self._environments = {
            "fsdp1": sharded,
            "fsdp2": sharded,
            "full2": full,
            "ddp2": common,
            "one": common,
        }
        self._models = str(work / "models")
        self._num_runs = 0
        self._lock = threading.Lock()
        if not Path(self._models).is_dir():
            run_ranks(make_models, 1, self._models, environment=common)

    def run(self, case: Case) -> list[Difference]:
        """Run a combination. Return the differences of the first call that has any."""
        with self._lock:
            self._num_runs += 1
            place = self._work / f"run-{self._num_runs}"
        case = complete(case)
        try:
            with ThreadPoolExecutor(2) as pool:
                stock = pool.submit(self._side, sessions(case, False), place / "stock")
                ours = pool.submit(self._side, sessions(case, True), place / "ours")
            return judge(case, stock.result(), ours.result())
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _side(self, planned: list[Session], place: Path) -> list[Step]:
        """Run all sessions of a side. Return what each call did, and how each session ended."""
        (place / "nested").mkdir(parents=True)
        steps: list[Step] = []
        for session in planned:
            steps += self._session(session, place)
            steps[-1].files = describe(place)
        return steps

    def _session(self, session: Session, place: Path) -> list[Step]:
        """Run a session. Return rank 0's calls, and a last step that says how all ranks ended."""
        world = session.case["world"]
        arguments = (session, str(place), self._models)
        processes, reports = start_ranks(
            run_session, WORLDS[world], *arguments, environment=self._environments[world]
        )
        results: list[Any] = [None] * len(processes)
        deadline = time.monotonic() + self._timeout
        while None in results and time.monotonic() < deadline:
            try:
                rank, kind, value = reports.get(timeout=0.1)
                results[rank] = (kind, value)
            except queue.Empty:
                is_any_alive = any(process.is_alive() for process in processes)
                if not is_any_alive and reports.empty():
                    break
        endings = [how_it_ended(*pair) for pair in zip(processes, results, strict=True)]
        steps = list(results[0][1]) if endings[0] == RETURNED else []
        for result in results[1:]:
            if result and result[0] == "result":
                for step, other in zip(steps, result[1], strict=False):
                    step.other_ranks.append(other.outcome)
        ending = RETURNED if set(endings) == {RETURNED} else "failed"
        return [*steps, Step("exit", ending, endings)]


def how_it_ended(process: Any, result: tuple[str, Any] | None) -> str:
    """Return how a rank ended. Kill it if it hangs."""
    process.join(timeout=0.1 if result is None else 5)
    if process.is_alive():
        process.kill()
        process.join()
        return "hung"
    if result is None:
        return f"died with exit code {process.exitcode}"
    kind, value = result
    return RETURNED if kind == "result" else "\n".join(value)
