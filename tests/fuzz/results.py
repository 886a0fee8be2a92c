"""What came of combinations: a line of a results file for each, and the classes of all."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.combinations import Case
from tests.fuzz.compare import Difference
from tests.fuzz.shrinking import kinds_of, surprises


@dataclass
class Result:
    """What came of a combination.

    Args:
        source: the seed, or the line of the file.
        case: the combination.
        differences: what differs and is not announced.
        announced: the sentences that announce other differences.
        smallest: the smallest combination with the first of the differences, if it was sought.
        seconds: how long both sides took.
    """

    source: str
    case: Case
    differences: list[Difference]
    announced: list[str] = field(default_factory=list)
    smallest: Case | None = None
    seconds: float = 0.0

    @property
    def group(self) -> str:
        """What counts as one class: the first difference, or what is announced, or `equal`."""
        if self.differences:
            return f"DIFFERENT: {self.differences[0].kind}"
        return self.announced[0] if self.announced else "equal"

    def __str__(self) -> str:
        text = f"{self.source}: {self.group}: {json.dumps(self.smallest or self.case)}"
        if not self.differences:
            return text
        first = self.differences[0]
        others = ", ".join(kinds_of(self.differences)[1:6])
        lines = [text, f"    {first.call}, stock: {first.stock}", f"    ours: {first.ours}"]
        return "\n".join([*lines, f"    also: {others}"] if others else lines)


def result_of(source: str, case: Case, differences: list[Difference], seconds: float) -> Result:
    sentences = sorted({found.announced for found in differences if found.announced})
    return Result(source, case, surprises(differences), sentences, None, round(seconds, 2))


def write_result(result: Result, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps(asdict(result)) + "\n")


def read_results(file: Path) -> list[Result]:
    results = []
    for line in file.read_text().splitlines():
        facts: dict[str, Any] = json.loads(line)
        facts["differences"] = [Difference(**found) for found in facts["differences"]]
        results.append(Result(**facts))
    return results


def summary(results: list[Result]) -> str:
    """Return the number of combinations in each class, with the smallest one of each."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.group, []).append(result)
    lines = [f"{len(results):5} combinations"]
    for group, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        texts = [json.dumps(result.smallest or result.case) for result in found]
        example = "" if group == "equal" else f"\n        {min(texts, key=len)}"
        lines.append(f"{len(found):5} {group}{example}")
    return "\n".join(lines)
