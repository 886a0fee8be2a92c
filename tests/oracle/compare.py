"""Compares the ranks' run with the reference.

A parameter is wrong if the difference of its changes is larger than a tolerance, relative to its
change in the reference. Parameters whose change is hardly larger than rounding are not judged.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.oracle.cases import Case
from tests.oracle.runs import LOGGED

TOLERANCE = {"no": 1e-3, "bf16": 8e-2}  # relative error of a change that counts as rounding
SILENT = 20  # a change is judged if it is this many times its rounding
FLOAT32_ROUNDING = 2**-23
FUSED_TOLERANCE = 1e-3
OWN_ERRORS = ("RecipeError", "LoadError", "PatchError", "CheckpointError")
Values = dict[str, Any]


@dataclass
class Errors:
    """Relative errors of the parameters' changes."""

    found: dict[str, float] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)  # the part that may be rounding
    silent: list[str] = field(default_factory=list)  # without a change that can be measured
    starts: list[str] = field(default_factory=list)  # with other values before the first step

    def wrong(self, tolerance: float) -> dict[str, float]:
        """Return the errors above the tolerance, the largest first."""
        wrong = {
            name: error
            for name, error in self.found.items()
            if not error <= tolerance + self.rounding[name]  # also true for NaN
        }
        return dict(sorted(wrong.items(), key=lambda item: -item[1]))


def judge(case: Case, ranks: Any, reference: Any, outputs: dict[str, str]) -> dict[str, Any]:
    """Return the verdict with details; `ranks` and `reference` are results, or texts of errors."""
    if isinstance(reference, str):
        line = reason(reference)
        if line.startswith("DoesNotApply"):
            return {"verdict": "does not apply", "why": line.partition(": ")[2]}
        theirs = reason(ranks) if isinstance(ranks, str) else "train"
        return {"verdict": "upstream", "why": line, "ranks": theirs}
    extra = {}
    if reference.get("fused", 0) > FUSED_TOLERANCE:
        extra["fused_differs"] = reference["fused"]
    if isinstance(ranks, str):
        line = reason(ranks)
        if any(name in line.partition(":")[0] for name in OWN_ERRORS):
            return {"verdict": "refused", "why": line} | extra
        return {"verdict": "FAILS", "why": line, "trace": ranks[-1500:]} | extra
    check_runs(case, ranks, reference)
    return judge_values(case, ranks, reference, outputs) | extra


def check_runs(case: Case, ranks: dict[str, Any], reference: dict[str, Any]) -> None:
    """Raise an AssertionError if the runs are not what they should be."""
    assert ranks["distributed"] == "FSDP" and ranks["units"], ranks
    assert reference["distributed"] == "NO" and not reference["units"], reference
    assert ranks["step"] == reference["step"] == case.num_steps, (ranks, reference)
    assert ranks["resumed"] == bool(case.resume), ranks


def judge_values(
    case: Case, ranks: dict[str, Any], reference: dict[str, Any], outputs: dict[str, str]
) -> dict[str, Any]:
    values = {name: read_values(output) for name, output in outputs.items()}
    if not is_finite(values["one"], reference["loss"]):
        return {"verdict": "upstream", "why": "the reference's values are not finite"}
    errors = errors_of(values["ranks"], values["one"], case.num_steps)
    tolerance = TOLERANCE[case.precision]
    wrong = errors.wrong(tolerance)
    starts = len(errors.starts)
    complaints = [
        *differing_names(values["ranks"]["before"], values["one"]["before"]),
        *([f"{starts} first values differ: {errors.starts[:3]}"] if errors.starts else []),
        *([f"{len(wrong)} of {len(errors.found)} changes differ: {first(wrong)}"] if wrong else []),
        *differing_logs(ranks, reference, tolerance),
        *([] if errors.found else ["no parameter has a change that can be judged"]),
    ]
    found: dict[str, Any] = {"verdict": "WRONG" if complaints else "equal"}
    if complaints:
        found["why"] = "; ".join(complaints)
    return found | {
        "parameters": len(errors.found),
        "silent": len(errors.silent),
        "units": ranks["units"],
        "worst": float(f"{max(errors.found.values(), default=0):.2g}"),
        "cpu_seconds": [ranks["cpu_seconds"], reference["cpu_seconds"]],
    }


def first(wrong: dict[str, float]) -> str:
    return ", ".join(f"{name} by {error:.2g}" for name, error in list(wrong.items())[:4])


def read_values(output: str) -> dict[str, Values]:
    import torch

    return {when: torch.load(Path(f"{output}-{when}.pt")) for when in ("before", "after")}


def is_finite(values: dict[str, Values], losses: list[float]) -> bool:
    tensors = [*values["before"].values(), *values["after"].values()]
    return all(map(math.isfinite, losses)) and all(bool(t.isfinite().all()) for t in tensors)


def differing_names(ranks: Values, reference: Values) -> list[str]:
    """Return complaints about parameters that only one of the runs trains."""
    found = []
    for name, more, less in (
        ("the ranks train", ranks, reference),
        ("the reference trains", reference, ranks),
    ):
        names = sorted(more.keys() - less.keys())
        if names:
            found.append(f"only {name} {len(names)} parameters: {', '.join(names[:3])}")
    return found


def differing_logs(ranks: dict[str, Any], reference: dict[str, Any], tolerance: float) -> list[str]:
    """Return complaints about losses and gradient norms."""
    found = []
    for key in LOGGED:
        pairs = list(zip(ranks[key], reference[key], strict=False))
        is_close = all(abs(a - b) <= tolerance * (abs(b) + 1e-9) for a, b in pairs)
        if not is_close or len(ranks[key]) != len(reference[key]):
            found.append(f"{key} is {rounded(ranks[key])} instead of {rounded(reference[key])}")
    return found


def rounded(numbers: list[float]) -> list[float]:
    return [float(f"{number:.5g}") for number in numbers]


def errors_of(ranks: dict[str, Values], one: dict[str, Values], num_steps: int) -> Errors:
    """Return the errors of the changes that both runs have made."""
    import torch

    errors = Errors()
    names = sorted(ranks["before"].keys() & one["before"].keys())
    references = {name: one["after"][name].double() - one["before"][name] for name in names}
    norms = torch.tensor([float(change.norm()) for change in references.values()])
    for name in names:
        before = ranks["before"][name].double()
        change = ranks["after"][name].double() - before
        reference = references[name]
        if not torch.equal(ranks["before"][name], one["before"][name]):
            errors.starts.append(name)
        # Of the sums that update the parameter, and of those that make the gradient.
        rounding = float(before.norm()) * FLOAT32_ROUNDING * num_steps**0.5
        noise = rounding + 1e-6 * float(norms.norm())
        size = float(reference.norm())
        if max(float(change.norm()), size) < SILENT * noise:
            errors.silent.append(name)
            continue
        errors.found[name] = float((change - reference).norm()) / max(size, noise)
        errors.rounding[name] = noise / max(size, noise)
    return errors


def reason(text: str) -> str:
    """Return the last line of the first rank's traceback, or that a rank has hung or died."""
    skipped = (" ", "---", "Traceback", "During", "The above")
    lines = [line for line in text.splitlines() if line and not line.startswith(skipped)]
    named = [line for line in lines if is_error(line.partition(":")[0])]
    # Errors that the failure of another rank has caused.
    caused = ("ConnectionClosed", "DistBackend")
    own = [line for line in named if not any(name in line for name in caused)]
    hung = [line for line in text.splitlines() if "no report" in line]
    chosen = own or hung or named or lines[-1:] or [text]
    return shorten(chosen[0])[:400]


def is_error(name: str) -> bool:
    return " " not in name and any(end in name for end in ("Error", "Exception", "DoesNotApply"))


def shorten(line: str) -> str:
    """Return the line with the error's class, but not its module."""
    name, colon, rest = line.partition(":")
    return name.rpartition(".")[2] + colon + rest if is_error(name) else line
