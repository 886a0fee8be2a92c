"""`hf-fsdp sweep`: the same recipe over numbers of ranks and templates; one table and plots of what it costs.

A case that runs out of memory is a result like any other, and one that fails for another reason is named; the sweep
goes on. Runs on this machine, or writes the Slurm jobs and collects what they have left.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.metrics import progress
from hf_fsdp_recipes.tools.sweep import cases, results, run_status, trial

SCALING_PLOT, STRATEGIES_PLOT = "scaling.png", "strategies.png"
SUBMIT_FILE = "submit.sh"


def command(
    recipe: Path | None,
    ranks: str,
    templates: str,
    output: Path | None,
    steps: int,
    overrides: Sequence[str],
    script: Path,
    time_limit_minutes: float,
    gpus_per_node: int,
    is_submitting: bool,
    collected: Path | None,
) -> str:
    """Do what the command line asks for and return what to print.

    Raises:
        PlanError, TemplateError: it cannot be done as asked, or no case has finished.
    """
    if collected is not None:
        return _written(collected)
    if recipe is None:
        raise PlanError("no recipe. Rule: hf-fsdp sweep recipes/X.yaml --ranks 1,2,4, or --collect DIR.")
    output = output or Path("runs") / f"sweep_{recipe.stem}"
    per_node = gpus_per_node if is_submitting else None
    names = [name.strip().removesuffix(".yaml") for name in templates.split(",")]
    request = cases.Request(recipe, _numbers(ranks), names, output, steps, tuple(overrides), per_node)
    if is_submitting:
        return submit(request)
    if not script.is_file():
        raise PlanError(f"no {script} here. Remedy: start from the root of a checkout, or --script.")
    run(request, script, time_limit_minutes * 60)
    return _written(output)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise PlanError(f"ranks {text!r}. Rule: numbers with commas between, 1,2,4 say.") from error


def run(request: cases.Request, script: Path, time_limit_seconds: float) -> None:
    """Run every case that has no result yet, one after the other, and print each outcome."""
    wanted, refusals = cases.make_cases(request)
    for refusal in refusals:
        print(f"left out: {refusal}", flush=True)
    with progress.bar(request.steps * len(wanted), "sweep", "step") as shown:
        for number, case in enumerate(wanted):
            name = f"{case.template} on {case.num_ranks} rank{'s'[: case.num_ranks != 1]}"
            shown.set_description(f"case {number + 1}/{len(wanted)}, {name}")
            before = number * request.steps

            def on_step(step: int, before: int = before) -> None:
                shown.update(before + step - shown.n)

            found = find_result(case)
            is_new = found is None
            found = found or trial.run(case, script, time_limit_seconds, on_step)
            on_step(request.steps)
            _say(f"{name}: {found}" + ("" if is_new else " (as before)"))


def _say(line: str) -> None:
    if progress.is_shown():
        progress.say(line)
    else:
        print(line, flush=True)


def find_result(case: cases.Case) -> str | None:
    """Return the outcome of an earlier run with the same settings, if it finished or ran out of memory, or None."""
    known = cases.read(case.directory)
    if known.get("settings") != case.settings:
        return None
    found = known.get("outcome") or run_status.find_outcome(case.directory, case.steps)
    if found == cases.FINISHED and not cases.has_finished(case.directory, case.steps):
        return None
    return found if found in (cases.FINISHED, cases.OUT_OF_MEMORY) else None


def submit(request: cases.Request) -> str:
    """Write a job for every case that has no result yet; return how to submit them."""
    wanted, refusals = cases.make_cases(request)
    lines = [
        "#!/bin/bash",
        "# One job a case. From the root of the checkout, then: hf-fsdp sweep --collect DIR",
        "set -e",
    ]
    new = [case for case in wanted if find_result(case) is None]
    for case in new:
        cases.begin(case)
        lines.append(job_line(case))
    request.output.mkdir(parents=True, exist_ok=True)
    file = request.output / SUBMIT_FILE
    file.write_text("\n".join(lines).replace("DIR", str(request.output), 1) + "\n", encoding="utf-8")
    told = [f"left out: {refusal}" for refusal in refusals]
    return "\n".join(
        [*told, f"{len(new)} jobs: bash {file}; when they have ended: hf-fsdp sweep --collect {request.output}"]
    )


def job_line(case: cases.Case) -> str:
    """Return the command that submits a case through recipes/launch.slurm, whose variables these are."""
    per_node = -(-case.num_ranks // case.num_nodes)
    directory = case.directory
    variables = {
        "TEMPLATE": directory / cases.TEMPLATE_FILE,
        "NPROC_PER_NODE": per_node,
        "LOG_DIR": directory / run_status.RANK_LOGS,
    }
    options = [
        f"--nodes={case.num_nodes}",
        f"--job-name={directory.name}",
        f"--output={directory / run_status.JOB_LOG_FILE}",
    ]
    options += [] if case.is_on_cpu else [f"--gpus-per-node={per_node}"]
    assigned = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
    return f"{assigned} sbatch {shlex.join([*options, 'recipes/launch.slurm', *case.arguments])}"


def _written(directory: Path) -> str:
    """Write table and plots of a directory.

    Raises:
        PlanError: it holds no case, or none has finished or run out of memory.
    """
    table = write(directory)
    return f"sweep: {table}\n\n" + "\n".join(line for line in table.read_text().splitlines() if line.startswith("|"))


def write(directory: Path) -> Path:
    """Write sweep.json, sweep.md and its plots from what the cases have left; return the table.

    Raises:
        PlanError: it holds no case, or none has a result.
    """
    found = results.collect(directory)
    if not found:
        raise PlanError(
            f"{directory} holds no case of a sweep. Rule: hf-fsdp sweep writes one into each of its folders."
        )
    results.write_json(directory, found)
    table = results.write_table(directory, found, _draw(directory, found))
    if not any(result["outcome"] in (cases.FINISHED, cases.OUT_OF_MEMORY) for result in found):
        first = found[0]
        raise PlanError(f"no case has finished: {first['template']} on {first['num_ranks']} ranks: {first['outcome']}.")
    return table


def _draw(directory: Path, found: list[results.Result]) -> list[tuple[str, str]]:
    if not any(result["outcome"] == cases.FINISHED for result in found):
        return []
    from hf_fsdp_recipes.tools.sweep import scaling_plots

    scaling_plots.draw_scaling(found).savefig(directory / SCALING_PLOT)
    drawn = [("memory, epoch time and step time against ranks", SCALING_PLOT)]
    if any("tokens_per_second" in result for result in found):
        scaling_plots.draw_strategies(found).savefig(directory / STRATEGIES_PLOT)
        drawn.append(("strategies", STRATEGIES_PLOT))
    return drawn
