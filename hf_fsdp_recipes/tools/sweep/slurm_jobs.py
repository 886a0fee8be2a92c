"""Slurm jobs for the cases of a sweep, submitted through recipes/launch.slurm."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hf_fsdp_recipes.tools.sweep.cases import TEMPLATE_FILE, Case
from hf_fsdp_recipes.tools.sweep.run_status import JOB_LOG_FILE, RANK_LOGS
from hf_fsdp_recipes.tools.sweep.sweep import find_result
from hf_fsdp_recipes.units import count

SUBMIT_FILE = "submit.sh"


def write_jobs(cases: Sequence[Case], output: Path) -> str:
    """Write submit.sh with a job for each case that has no result yet; return how to submit them."""
    new = [case for case in cases if find_result(case) is None]
    for case in new:
        case.start_record()
    file, collect = output / SUBMIT_FILE, f"hf-fsdp sweep --collect {output}"
    header = f"#!/bin/bash\n# One job per case. Run this from the root of the checkout, then: {collect}\nset -e\n"
    output.mkdir(parents=True, exist_ok=True)
    file.write_text(header + "".join(f"{_job_line(case)}\n" for case in new), encoding="utf-8")
    return f"{count(len(new), 'job')} to submit: bash {file}\nwhen they have ended: {collect}"


def _job_line(case: Case) -> str:
    """Return the sbatch command of a case; launch.slurm documents the variables."""
    ranks_per_node = -(-case.num_ranks // case.num_nodes)
    variables = {
        "TEMPLATE": case.directory / TEMPLATE_FILE,
        "NPROC_PER_NODE": ranks_per_node,
        "LOG_DIR": case.directory / RANK_LOGS,
    }
    options = [f"--nodes={case.num_nodes}", f"--job-name={case.directory.name}"]
    options += [f"--output={case.directory / JOB_LOG_FILE}"]
    options += [] if case.is_on_cpu else [f"--gpus-per-node={ranks_per_node}"]
    assignments = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
    return f"{assignments} sbatch {shlex.join([*options, 'recipes/launch.slurm', *case.arguments])}"
