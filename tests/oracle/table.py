"""Counts the verdicts of a results file."""

import collections
import json
from pathlib import Path
from typing import Any

from tests.oracle.cases import parse_case

TITLES = {
    "equal": "equal",
    "refused": "refused by this package",
    "upstream": "the reference fails too",
    "cannot be made": "cannot be made small",
    "does not apply": "does not apply",
    "WRONG": "different",
    "FAILS": "fail only on the ranks",
    "driver error": "errors of the oracle",
}


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each case."""
    if not file.exists():
        return {}
    results = [json.loads(line) for line in file.read_text().splitlines()]
    return {result["case"]: result for result in results}


def group_of(text: str) -> str:
    """Return the kind and method of a case, and whether it has other options."""
    case = parse_case(text)
    words = [word for word in text.split()[2:] if not word.startswith("kind=")]
    return f"{case.kind} {case.method}{' with options' if words else ''}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the counts of all cases, of their groups, and of the reasons."""
    verdicts = collections.Counter(result["verdict"] for result in results.values())
    lines = [f"{len(results):5} cases"]
    for verdict, title in TITLES.items():
        if verdicts[verdict]:
            lines.append(f"{verdicts[verdict]:5} {title}")
            lines += reasons(results, verdict)
    lines += ["", *groups(results)]
    differing = [text for text, result in results.items() if "fused_differs" in result]
    if differing:
        lines += ["", f"TRL's fused loss is not the model's own: {', '.join(differing)}"]
    return "\n".join(lines)


def reasons(results: dict[str, dict[str, Any]], verdict: str) -> list[str]:
    if verdict == "equal":
        return []
    found = [(text, result) for text, result in results.items() if result["verdict"] == verdict]
    if verdict in ("WRONG", "FAILS", "driver error"):
        return [f"        {text}: {result['why'][:300]}" for text, result in found]
    counts = collections.Counter(result["why"][:160] for _, result in found)
    return [f"      {count:4} {why}" for why, count in counts.most_common()]


def groups(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table with a line for each kind and method."""
    counts: dict[str, collections.Counter[str]] = {}
    for text, result in results.items():
        counts.setdefault(group_of(text), collections.Counter())[result["verdict"]] += 1
    used = [verdict for verdict in TITLES if any(row[verdict] for row in counts.values())]
    lines = [f"{'':34}" + "".join(f"{verdict:>16}" for verdict in used)]
    for group, row in sorted(counts.items()):
        lines.append(f"{group:34}" + "".join(f"{row[verdict]:16}" for verdict in used))
    return lines
