"""Runs the cases of a sweep one after the other. torch is imported only when a sweep runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
import yaml

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE
from hf_fsdp_recipes.tools.files import find_file, read_yaml
from hf_fsdp_recipes.tools.subprocess_runner import put_on_cpu, run_recipe
from hf_fsdp_recipes.tools.sweep.results import FINISHED, LOG_FILE, OUT_OF_MEMORY, find_status, write_table

SETTINGS_FILE, TEMPLATE_FILE = "settings.yaml", "template.yaml"
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
    collect: Annotated[bool, typer.Option("--collect", help="Only show what has run.")] = False,
) -> None:
    """Which template scales? Measure a recipe's memory, time and throughput with each template and number of ranks.

    The results are a table and plots. Fields of the recipe can follow, such as `--max_length 2048`.
    """
    if not collect:
        if not (config and accelerate_config and num_processes):
            raise ToolError("nothing to run. Add --config, --accelerate_config and --num_processes, or --collect.")
        import torch

        on_cpu = not torch.accelerator.is_available()
        arguments = ["--config", str(find_file("recipe", config)), "--max_steps", str(steps), *MEASURE_ONLY.split()]
        arguments += [*(["--bf16", "false"] if on_cpu else ()), *context.args]
        templates = {Path(name).stem: read_yaml(find_file("template", name)) for name in accelerate_config}
        for name, template in templates.items():
            for ranks in sorted(set(num_processes)):
                case = output_dir / f"{name}_{ranks}ranks"
                one = template | {"num_processes": ranks, "num_machines": 1}
                status = run_case(case, put_on_cpu(one, ranks) if on_cpu else one, arguments, limit_minutes * 60)
                print(f"{case.name}: {status}", flush=True)
    print(write_table(output_dir).read_text())


def run_case(case: Path, template: dict[str, Any], arguments: Sequence[str], limit_seconds: float) -> str:
    """Run a case, unless it has a result with the same settings; return its status."""
    file, log, recipe = case / SETTINGS_FILE, case / LOG_FILE, Path(arguments[1]).read_text()
    settings = yaml.safe_dump({"arguments": list(arguments), "recipe": recipe, "template": template})
    if file.is_file() and file.read_text() == settings and find_status(case) in (FINISHED, OUT_OF_MEMORY):
        return f"{find_status(case)} (earlier run)"
    case.mkdir(parents=True, exist_ok=True)
    (case / METRICS_FILE).unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    (case / TEMPLATE_FILE).write_text(yaml.safe_dump(template))
    file.write_text(settings)
    if run_recipe(case / TEMPLATE_FILE, [*arguments, "--output_dir", str(case)], log, limit_seconds) is None:
        with log.open("a") as output:
            output.write(f"\nTimeoutError: the case took longer than {limit_seconds / 60:g} minutes\n")
    return find_status(case)
