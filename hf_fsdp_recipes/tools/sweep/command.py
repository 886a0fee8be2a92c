"""Runs the cases of a sweep one after the other, or writes Slurm jobs for them. torch is imported only when a sweep runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
import yaml

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE
from hf_fsdp_recipes.tools.files import find_file, read_yaml, shipped_directory
from hf_fsdp_recipes.tools.subprocess_runner import put_on_cpu, run_recipe
from hf_fsdp_recipes.tools.sweep.results import LOG_FILE, RANK_LOGS, find_status, has_result, write_table

SETTINGS_FILE, TEMPLATE_FILE, JOBS_FILE = "settings.yaml", "template.yaml", "submit.sh"
MEASURE_ONLY = (
    "--logging_steps 1 --save_strategy no --eval_strategy no --load_best_model_at_end false --export false "
    "--report_to none --push_to_hub false --disable_tqdm true"
)


def sweep(
    context: typer.Context,
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Directory of the sweep.")],
    config: Annotated[Optional[str], typer.Option("--config", help="Recipe: a name or a file.")] = None,
    accelerate_config: Annotated[list[str], typer.Option("--accelerate_config", help="Template; repeatable.")] = [],  # noqa: B006
    num_processes: Annotated[list[int], typer.Option("--num_processes", min=1, help="Ranks; repeatable.")] = [],  # noqa: B006
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each case; the first 3 are warm-up.")] = 13,
    limit_minutes: Annotated[float, typer.Option("--limit_minutes", help="A case that takes longer fails.")] = 60,
    slurm: Annotated[bool, typer.Option("--slurm", help="Only write Slurm jobs, to submit.sh.")] = False,
    gpus_per_node: Annotated[int, typer.Option("--gpus_per_node", min=1, help="GPUs of a node, with --slurm.")] = 8,
    collect: Annotated[bool, typer.Option("--collect", help="Only show what has run.")] = False,
) -> None:
    """Which template scales? Measure a recipe's memory, time and throughput with each template and number of ranks.

    The results are a table and plots. Fields of the recipe can follow, such as `--max_length 2048`.
    """
    if not collect:
        if not (config and accelerate_config and num_processes):
            raise ToolError("nothing to run. Add --config, --accelerate_config and --num_processes, or --collect.")
        import torch

        is_on_cpu = not slurm and not torch.accelerator.is_available()
        arguments = ["--config", str(find_file("recipe", config)), "--max_steps", str(steps), *MEASURE_ONLY.split()]
        arguments += [*(["--bf16", "false"] if is_on_cpu else ()), *context.args]
        templates = {Path(name).stem: read_yaml(find_file("template", name)) for name in accelerate_config}
        cases = []
        for name, template in templates.items():
            for ranks in sorted(set(num_processes)):
                one = put_on_cpu(template, ranks) if is_on_cpu else template
                one = one | {"num_processes": ranks, "num_machines": 1}  # launch.slurm sets both for its nodes
                cases.append(write_case(output_dir / f"{name}_{ranks}ranks", one, arguments))
        if slurm:
            print(
                f"Submit the jobs: bash {write_jobs(output_dir, cases, arguments, gpus_per_node)}. Then add --collect."
            )
            return
        for case in cases:
            print(f"{case.name}: {run_case(case, arguments, limit_minutes * 60, is_on_cpu)}", flush=True)
    print(write_table(output_dir).read_text())


def write_case(case: Path, template: dict[str, Any], arguments: Sequence[str]) -> Path:
    """Write a case's settings; if they have changed since the case ran, delete its measurements. Return its directory."""
    recipe, file = Path(arguments[1]).read_text(), case / SETTINGS_FILE
    settings = yaml.safe_dump({"arguments": list(arguments), "recipe": recipe, "template": template})
    if not file.is_file() or file.read_text() != settings:
        case.mkdir(parents=True, exist_ok=True)
        (case / METRICS_FILE).unlink(missing_ok=True)
        (case / LOG_FILE).unlink(missing_ok=True)
        (case / TEMPLATE_FILE).write_text(yaml.safe_dump(template))
        file.write_text(settings)
    return case


def run_case(case: Path, arguments: Sequence[str], limit_seconds: float, on_cpu: bool) -> str:
    """Run a case that has no result yet; return its status."""
    if has_result(case):
        return f"{find_status(case)} (earlier run)"
    log = case / LOG_FILE
    log.unlink(missing_ok=True)
    arguments = [*arguments, "--output_dir", str(case)]
    if run_recipe(case / TEMPLATE_FILE, arguments, log, limit_seconds, on_cpu=on_cpu) is None:
        with log.open("a") as file:
            file.write(f"\nTimeoutError: the case took longer than {limit_seconds / 60:g} minutes\n")
    return find_status(case)


def write_jobs(output_dir: Path, cases: Sequence[Path], arguments: Sequence[str], gpus_per_node: int) -> Path:
    """Write submit.sh, which submits launch.slurm for each case without a result."""
    lines = ["#!/bin/bash", "set -e"]
    for case in cases:
        if not has_result(case):
            num_ranks = read_yaml(case / TEMPLATE_FILE)["num_processes"]
            num_nodes = -(-num_ranks // gpus_per_node)
            per_node = str(num_ranks // num_nodes)
            variables = {"TEMPLATE": case / TEMPLATE_FILE, "NPROC_PER_NODE": per_node, "LOG_DIR": case / RANK_LOGS}
            job = ["env", *(f"{name}={value}" for name, value in variables.items())]
            job += ["sbatch", f"--nodes={num_nodes}", f"--gpus-per-node={per_node}", f"--output={case}/slurm.log"]
            job += [str(shipped_directory("recipe") / "launch.slurm"), *arguments, "--output_dir", str(case)]
            lines.append(shlex.join(job))
    (output_dir / JOBS_FILE).write_text("\n".join([*lines, ""]))
    return output_dir / JOBS_FILE
