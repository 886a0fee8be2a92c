"""The `hf-fsdp selftest` command. Does not import torch, so that `hf-fsdp --help` responds immediately."""

import tempfile
import time
from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.errors import RecipeError


def selftest(
    output: Annotated[Path, typer.Option(help="The report to write.")] = Path("selftest.md"),
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time limit; measurements that would exceed it are skipped.")
    ] = 5.0,
    script: Annotated[Optional[Path], typer.Option(help="Script to launch; default: the shipped sft.py.")] = None,
) -> None:
    """Measure copies, saving and loading on this machine's devices, and check that a killed run resumes exactly."""
    from hf_fsdp_recipes.tools.selftest import measurements  # loads torch

    output.parent.mkdir(parents=True, exist_ok=True)
    deadline, results = time.monotonic() + 60 * minutes, []
    with tempfile.TemporaryDirectory(prefix="selftest-", dir=output.parent) as directory:
        site = measurements.find_site(Path(directory), script or measurements.SFT_SCRIPT, deadline)
        for name, (expected_seconds, function) in measurements.MEASUREMENTS.items():
            if time.monotonic() + expected_seconds <= deadline:
                result = measurements.measure(name, function, site)
            else:
                late = f"It takes about {expected_seconds} s, more than is left. Raise --minutes."
                result = measurements.Result(name, "skipped", error=late)
            results.append(result)
            reason = result.error.partition("\n")[0]
            print(f"{result.status:<8}{name:<21}{result.seconds:4.0f} s  {reason}".rstrip(), flush=True)
            measurements.write_report(output, "hf-fsdp selftest", site.device, site.num_ranks, results)
    print(f"report: {output}")
    if any(result.status == "failed" for result in results):
        raise RecipeError(f"The self-test failed; {output} has the reasons. Attach it to an issue.")
