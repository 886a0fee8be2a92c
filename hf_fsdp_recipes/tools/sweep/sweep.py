"""Runs every case of a sweep on this machine, or writes Slurm jobs for them, and summarizes the results."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from hf_fsdp_recipes.configs.shipped_files import find_file
from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.metrics import memory, progress
from hf_fsdp_recipes.tools import subprocess_runner
from hf_fsdp_recipes.tools.sweep import results, run_status
from hf_fsdp_recipes.tools.sweep.cases import TEMPLATE_FILE, Case, read_record
from hf_fsdp_recipes.units import count

SCALING_PLOT, STRATEGIES_PLOT, SUBMIT_FILE = "scaling.png", "strategies.png", "submit.sh"
SAMPLE_SECONDS = 0.2  # time between two samples of host memory
SAMPLES_PER_CHECK = 5  # samples between two updates of the process list and of the step count


def run_cases(cases: Sequence[Case], script: Path, time_limit_seconds: float) -> None:
    """Run each case that has no result yet, one after the other, and print how each ended."""
    with progress.bar(sum(case.num_steps for case in cases), "sweep", "step") as shown:
        num_before = 0
        for number, case in enumerate(cases, 1):
            shown.set_description(f"case {number}/{len(cases)}, {case.name}")

            def show_step(step: int, num_before: int = num_before) -> None:
                shown.update(num_before + step - shown.n)

            known = find_result(case)
            status = known or run_case(case, script, time_limit_seconds, show_step)
            show_step(case.num_steps)
            num_before += case.num_steps
            progress.print_above(f"{case.name}: {status}" + (" (earlier run)" if known else ""))


def find_result(case: Case) -> str | None:
    """Return the status of an earlier run with the same settings if that run finished or ran out of memory, else None."""
    record = read_record(case.directory)
    if record.get("settings") != case.settings:
        return None
    status = record.get("status") or run_status.find_status(case.directory, case.num_steps)
    if status == run_status.FINISHED and not run_status.has_finished(case.directory, case.num_steps):
        return None
    return status if status in (run_status.FINISHED, run_status.OUT_OF_MEMORY) else None


def run_case(case: Case, script: Path, time_limit_seconds: float, show_step: Callable[[int], None]) -> str:
    """Run a case, record the result in its directory, and return its status; `show_step` receives the number of steps so far."""
    case.start_record()
    config, log = case.directory / TEMPLATE_FILE, case.directory / run_status.LOG_FILE
    with subprocess_runner.launch(config, script, case.arguments, log, on_cpu=case.is_on_cpu) as run:
        run_exit = follow(run, time_limit_seconds, lambda: show_step(run_status.count_steps(case.directory)))
    status = run_status.find_status(case.directory, case.num_steps, run_exit)
    case.finish_record(status, run_exit.host_peak_bytes)
    return status


def follow(run: subprocess_runner.Run, time_limit_seconds: float, check: Callable[[], None]) -> run_status.RunExit:
    """Wait for a run, sample its host memory, and return how it ended; `check` is called about once per second."""
    num_kills, host_peak_bytes, timed_out = _count_kernel_kills(), 0, False
    try:
        for number in run.poll(time_limit_seconds, SAMPLE_SECONDS):
            if number % SAMPLES_PER_CHECK == 0:
                processes = run.processes()
                check()
            host_peak_bytes = max([host_peak_bytes, *map(_host_bytes, processes)])
    except TimeoutError:
        timed_out = True
    status = -9 if timed_out else run.exit_status or 0
    return run_status.RunExit(status, _count_kernel_kills() > num_kills, timed_out, host_peak_bytes)


def _host_bytes(process: psutil.Process) -> int:
    try:
        return memory.host_bytes(process.pid)
    except OSError:
        return 0  # the process has exited


def _count_kernel_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot."""
    file = Path("/proc/vmstat")
    lines = file.read_text().splitlines() if file.is_file() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def write_jobs(cases: Sequence[Case], output: Path) -> str:
    """Write submit.sh, which submits launch.slurm for each case without a result; return the commands to run."""
    new = [case for case in cases if find_result(case) is None]
    for case in new:
        case.start_record()
    file, collect = output / SUBMIT_FILE, f"hf-fsdp sweep --collect {output}"
    header = (
        f"#!/bin/bash\n# One job per case. Run this from the directory of the sweep command, then: {collect}\nset -e\n"
    )
    output.mkdir(parents=True, exist_ok=True)
    file.write_text(header + "".join(f"{_job_line(case)}\n" for case in new), encoding="utf-8")
    return f"{count(len(new), 'job')} to submit: bash {file}\nwhen they have ended: {collect}"


def _job_line(case: Case) -> str:
    """Return the sbatch command of a case; launch.slurm documents the variables that it sets."""
    ranks_per_node = -(-case.num_ranks // case.num_nodes)
    variables = {
        "TEMPLATE": case.directory / TEMPLATE_FILE,
        "NPROC_PER_NODE": ranks_per_node,
        "LOG_DIR": case.directory / run_status.RANK_LOGS,
    }
    options = [f"--nodes={case.num_nodes}", f"--job-name={case.directory.name}"]
    options += [f"--output={case.directory / run_status.JOB_LOG_FILE}"]
    options += [] if case.is_on_cpu else [f"--gpus-per-node={ranks_per_node}"]
    assignments = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
    # Prefer launch.slurm in the current directory (`hf-fsdp slurm init` writes it) to the shipped file.
    script = str(find_file("recipes", "launch.slurm"))
    return f"{assignments} sbatch {shlex.join([*options, script, *case.arguments])}"


def write_summary(directory: Path) -> Path:
    """Write sweep.json, sweep.md and the plots from the results so far; return the path of sweep.md.

    Raises a PlanError if no case has a result.
    """
    found = results.read_results(directory)
    if not found:
        raise PlanError(f"{directory} has no cases of a sweep. Pass the directory that `hf-fsdp sweep` wrote.")
    results.write_json(directory, found)
    table = results.write_table(directory, found, _draw_plots(directory, found))
    if all(result.status not in (run_status.FINISHED, run_status.OUT_OF_MEMORY) for result in found):
        first = found[0]
        raise PlanError(f"No case has a result. {first.template} on {count(first.num_ranks, 'rank')}: {first.status}.")
    return table


def _draw_plots(directory: Path, found: list[results.Result]) -> list[tuple[str, str]]:
    """Write the plots; return their titles and file names."""
    if not any(result.status == run_status.FINISHED for result in found):
        return []
    from hf_fsdp_recipes.tools.sweep import scaling_plots  # loads matplotlib

    scaling_plots.draw_scaling(found).savefig(directory / SCALING_PLOT)
    plots = [("memory, epoch time and step time by rank count", SCALING_PLOT)]
    if any(result.tokens_per_second for result in found):
        scaling_plots.draw_strategies(found).savefig(directory / STRATEGIES_PLOT)
        plots.append(("strategies compared", STRATEGIES_PLOT))
    return plots
