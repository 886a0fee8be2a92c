"""Runs the measurements of a self-test one after the other, and writes the report after each."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from hf_fsdp_recipes.tools.selftest import measurements
from hf_fsdp_recipes.tools.selftest.measurements import MEASUREMENTS, Result, Site, describe_devices, measure
from hf_fsdp_recipes.tools.selftest.report import write_report

TITLE = "Self-test of hf-fsdp-recipes"
ON_CPU = (
    "There is no accelerator, or CPU ranks were requested: the checks are valid, but the figures describe CPU ranks."
)


def run_selftest(output: Path, minutes: float, script: Path) -> bool:
    """Run all measurements that there is time for; return whether every check passed.

    Args:
        output: the report; a directory for models and checkpoints is created next to it, and deleted.
        minutes: measurements that would probably end later are skipped.
        script: recipes/sft.py.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="selftest-", dir=output.parent) as directory:
        site = replace(measurements.find_site(Path(directory)), script=script, deadline=deadline)
        results = [measure("devices", describe_devices, site)]
        _show(output, site, results)
        site = measurements.choose_sizes(site, results[0].figures)
        for name, (expected_seconds, function) in MEASUREMENTS.items():
            if time.monotonic() + expected_seconds > deadline:
                late = f"It takes about {expected_seconds} s, and less is left. Raise --minutes."
                results.append(Result(name, "skipped", 0.0, error=late))
            else:
                results.append(measure(name, function, site))
            _show(output, site, results)
    return all(result.status != "failed" for result in results)


def _show(output: Path, site: Site, results: list[Result]) -> None:
    """Print the last result and write the report so far."""
    last = results[-1]
    print(f"{last.status:<8}{last.name:<21}{last.seconds:4.0f} s  {last.error}".rstrip(), flush=True)
    write_report(output, TITLE, [ON_CPU] if site.on_cpu else [f"{site.num_ranks} devices of this machine."], results)
