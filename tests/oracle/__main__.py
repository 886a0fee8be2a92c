"""The oracle's command line."""

import argparse
import collections
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import tests.conftest  # sets variables for CPU ranks
import tests.oracle
from tests.oracle.cases import METHODS, OPTIONS, expand, read_cases
from tests.oracle.driver import TIMEOUT_SECONDS, Oracle
from tests.oracle.table import read_results, table

BAD = {"WRONG", "FAILS", "driver error"}


def parser() -> argparse.ArgumentParser:
    lines = [
        f"  {name:14} {option.metadata['text']} (default {option.default!r})"
        for name, option in OPTIONS.items()
    ]
    found = argparse.ArgumentParser(
        prog="python -m tests.oracle",
        description=tests.oracle.__doc__,
        epilog="\n".join([f"methods: {', '.join(METHODS)}", "options:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("family", nargs="?", help="a model type of transformers, all, all/N, or branching")
    add("method", nargs="?", help="see below")
    add("--options", nargs="*", default=[], help="NAME=VALUE ..., see below")
    add("--sweep", nargs="*", default=[], help="KIND:METHOD[:OPTION ...] for every family")
    add("--every", type=int, default=1, help="with --sweep, only every N-th family")
    add("--list", type=Path, help="file with a case in each line")
    add("--work", type=Path, default=Path(tempfile.gettempdir(), "oracle"), help="keeps models")
    add("--results", type=Path, default=Path("results.jsonl"), help="file with results so far")
    add("--again", action="store_true", help="also run cases that are in --results")
    add("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds for a run of a case")
    add("--budget", type=float, default=float("inf"), help="seconds; then no new case begins")
    add("--table", action="store_true", help="only print the counts of --results")
    return found


def cases_of(arguments: argparse.Namespace) -> list[str]:
    cases = []
    if arguments.family:
        cases += expand(" ".join([arguments.family, arguments.method, *arguments.options]))
    for sweep in arguments.sweep:
        kind, method, *options = sweep.split(":")
        words = [f"all/{arguments.every}", method, f"kind={kind}", *options, *arguments.options]
        cases += expand(" ".join(word for word in words if word != "kind=causal"))
    if arguments.list:
        cases += read_cases(arguments.list.read_text())
    return list(dict.fromkeys(cases))


def judge(oracle: Oracle, text: str, results: Path) -> dict[str, Any]:
    """Judge a case, print it and append it to the results."""
    begin = time.time()
    try:
        found = oracle.judge(text)
    except Exception:
        found = {"verdict": "driver error", "why": traceback.format_exc()[-800:]}
    found |= {"case": text, "wall": round(time.time() - begin, 1)}
    with results.open("a") as file:
        file.write(json.dumps(found) + "\n")
    shown = {key: value for key, value in found.items() if key not in ("case", "trace")}
    print(f"{text}: {json.dumps(shown)[:500]}", flush=True)
    return found


def main() -> int:
    arguments = parser().parse_args()
    if arguments.table:
        print(table(read_results(arguments.results)))
        return 0
    done = {} if arguments.again else read_results(arguments.results)
    oracle = Oracle(arguments.work, arguments.timeout)
    begin = time.time()
    verdicts: collections.Counter[str] = collections.Counter()
    for text in cases_of(arguments):
        if text not in done and time.time() - begin < arguments.budget:
            verdicts[judge(oracle, text, arguments.results)["verdict"]] += 1
    print(dict(verdicts), f"{time.time() - begin:.0f} s", flush=True)
    return int(bool(BAD & verdicts.keys()))


if __name__ == "__main__":
    sys.exit(main())
