"""Runs a case: both runs at the same time."""

import functools
import hashlib
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import make_tokenizer
from tests.oracle.cases import Case, parse_case
from tests.oracle.compare import judge
from tests.oracle.models import make_model
from tests.oracle.runs import train
from tests.oracle.trainers import Run
from tests.ranks.harness import run_ranks, template_environment

TEMPLATES = Path(__file__).resolve().parents[2] / "accelerate_configs"
MIN_UNIT = 20_000  # parameters, for units by size
TIMEOUT_SECONDS = 60.0


class Oracle:
    """Judges cases. Its directory keeps models between cases.

    Args:
        work: a directory.
        timeout: seconds for a run of a case.
    """

    def __init__(self, work: Path, timeout: float = TIMEOUT_SECONDS) -> None:
        self._work = work
        self._timeout = timeout
        (work / "runs").mkdir(parents=True, exist_ok=True)
        if not (work / "tokenizer").exists():
            make_tokenizer(work / "tokenizer")

    def judge(self, text: str) -> dict[str, Any]:
        """Train a case in both ways. Return the verdict with details.

        The verdict is `equal`, `WRONG`, `refused` (by this package), `FAILS` (only on the ranks),
        `upstream` (the reference fails too), `cannot be made` or `does not apply`.
        """
        case = parse_case(text)
        try:
            model = make_model(case, self._work)
        except Exception as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            return {"verdict": "cannot be made", "why": line[:200]}
        key = hashlib.sha1(text.encode()).hexdigest()[:12]
        with tempfile.TemporaryDirectory(prefix=key, dir=self._work / "runs") as folder:
            outputs = {name: str(Path(folder, name)) for name in ("ranks", "one")}
            parts = (str(model), str(self._work / "tokenizer"))
            results = self._train_both(case, parts, outputs)
            return judge(case, results["ranks"], results["one"], outputs)

    def _train_both(
        self, case: Case, parts: tuple[str, str], outputs: dict[str, str]
    ) -> dict[str, Any]:
        results: dict[str, Any] = {}
        reference = Run(*parts, outputs["one"], is_reference=True)
        ranks = [Run(*parts, outputs["ranks"], is_reference=False)]
        if case.resume:
            ranks = [
                Run(*parts, outputs["ranks"], is_reference=False, part=part)
                for part in ("first", "second")
            ]
        threads = [
            threading.Thread(target=self._attempt, args=(results, "one", case, [reference])),
            threading.Thread(target=self._attempt, args=(results, "ranks", case, ranks)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def _attempt(self, results: dict[str, Any], key: str, case: Case, runs: list[Run]) -> None:
        """Note the result of the last run, or the text of an error."""
        try:
            for run in runs:
                count = ranks_of(case, run)
                environment = environment_of(case, run, count)
                results[key] = run_ranks(
                    train,
                    count,
                    case,
                    run,
                    environment=environment,
                    timeout_seconds=self._timeout,
                )[0]
        except (Exception, pytest.fail.Exception) as error:
            results[key] = str(error)


def ranks_of(case: Case, run: Run) -> int:
    if run.is_reference:
        return 1
    return case.resume_ranks or case.num_ranks if run.part == "second" else case.num_ranks


def environment_of(case: Case, run: Run, num_ranks: int) -> dict[str, str]:
    """Return the launcher's variables. A second thread would slow such small models down."""
    if run.is_reference:
        return {"ACCELERATE_MIXED_PRECISION": case.precision, "OMP_NUM_THREADS": "1"}
    launcher = rank_environment(case.template, num_ranks, case.precision)
    return launcher | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


@functools.cache
def rank_environment(template: str, num_ranks: int, precision: str) -> dict[str, str]:
    """Return the variables of a template in accelerate_configs/, on CPU ranks of one machine."""
    config = yaml.safe_load((TEMPLATES / f"{template}.yaml").read_text())
    config |= {
        "use_cpu": True,
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": num_ranks,
    }
    config.pop("main_process_ip", None)
    if "parallelism_config" in config:
        config["parallelism_config"] |= {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": num_ranks // 2,
        }
    if "fsdp_min_num_params" in config["fsdp_config"]:
        config["fsdp_config"]["fsdp_min_num_params"] = MIN_UNIT
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        return template_environment(Path(file.name))
