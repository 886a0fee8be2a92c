"""The cases of a sweep: which template on how many ranks, in which directory, with which settings. Starts nothing.

What decides a case's figures is kept beside them in case.json, so that a case is run again when that has changed
and only then.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hf_fsdp_recipes.configs import templates
from hf_fsdp_recipes.distributed import is_true
from hf_fsdp_recipes.errors import PlanError, TemplateError
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, read_metrics

CASE_FILE, TEMPLATE_FILE = "case.json", "template.yaml"
FINISHED, OUT_OF_MEMORY, NOT_RUN = "finished", "OOM", "not run"
# Steps to measure, and nothing that a measurement does not need.
MEASURED = (
    "--logging_steps", "1", "--save_strategy", "no", "--eval_strategy", "no", "--load_best_model_at_end", "false",
    "--export", "false", "--report", "true", "--report_to", "none", "--push_to_hub", "false", "--disable_tqdm", "true",
)  # fmt: skip
ON_CPU = ("--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--tf32", "false")


@dataclass(frozen=True)
class Request:
    """What a sweep is asked for.

    Attributes:
        recipe: the YAML.
        ranks: numbers of ranks over all nodes.
        templates: names of shipped templates.
        output: the sweep's directory.
        steps: optimizer steps of a case.
        overrides: `--field value` pairs for the recipe.
        ranks_per_node: of a full node, where jobs are submitted; None for this machine alone.
    """

    recipe: Path
    ranks: Sequence[int]
    templates: Sequence[str]
    output: Path
    steps: int
    overrides: Sequence[str] = ()
    ranks_per_node: int | None = None


@dataclass(frozen=True)
class Case:
    """One run of the recipe.

    Attributes:
        template, num_ranks, num_nodes: what it is run with.
        directory: the run's output_dir.
        arguments: for recipes/sft.py.
        config: the Accelerate config, as YAML.
        settings: all that decides its figures.
    """

    template: str
    num_ranks: int
    num_nodes: int
    directory: Path
    arguments: list[str]
    config: str
    settings: dict[str, Any]

    @property
    def steps(self) -> int:
        """The optimizer steps that it takes."""
        return int(self.settings["steps"])

    @property
    def is_on_cpu(self) -> bool:
        """Whether its ranks are CPU ranks."""
        return bool(yaml.safe_load(self.config).get("use_cpu"))


def make_cases(request: Request) -> tuple[list[Case], list[str]]:
    """Return every template with every number of ranks, smallest first, and why which of them cannot be.

    Raises:
        PlanError: the recipe cannot be read, the machine has fewer accelerators than ranks, or no case can be.
        TemplateError: a name that is no template.
    """
    recipe = _read_recipe(request)
    if min(request.ranks, default=0) < 1 or request.steps < 1 or not request.templates:
        raise PlanError(
            f"ranks {list(request.ranks)}, {request.steps} steps. Rule: at least 1 of each, and a template."
        )
    is_here = request.ranks_per_node is None
    if is_here and not _uses_cpu() and max(request.ranks) > torch.accelerator.device_count():
        raise PlanError(
            f"{max(request.ranks)} ranks and {torch.accelerator.device_count()} accelerators. Rule: one for each rank. Remedy: "
            f"fewer ranks, or --submit for a cluster."
        )
    cases, refusals = [], []
    for template in [templates.find_template(name) for name in dict.fromkeys(request.templates)]:
        for num_ranks in sorted(set(request.ranks)):
            try:
                cases.append(_make_case(request, recipe, template, num_ranks))
            except TemplateError as error:
                refusals.append(f"{template.name} on {num_ranks} ranks cannot be: {error}")
    if not cases:
        raise PlanError(refusals[0] + (" Several nodes need --submit." if is_here else ""))
    return cases, refusals


def _read_recipe(request: Request) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(request.recipe.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PlanError(f"{request.recipe} cannot be read: {error}.") from error
    if not isinstance(recipe, dict):
        raise PlanError(f"{request.recipe} holds no mapping of keys to values.")
    return recipe


def _make_case(request: Request, recipe: dict[str, Any], template: templates.Template, num_ranks: int) -> Case:
    num_nodes = 1 if request.ranks_per_node is None else -(-num_ranks // request.ranks_per_node)
    config = templates.render(replace(template, num_processes=num_ranks, num_machines=num_nodes))
    if request.ranks_per_node is None and _uses_cpu():
        config = _for_cpu(config)
    parsed = yaml.safe_load(config)
    arguments = ["--config", str(request.recipe), "--max_steps", str(request.steps), *MEASURED]
    arguments += [*(ON_CPU if parsed.get("use_cpu") else ()), *request.overrides]
    directory = request.output / f"{template.name}_{num_ranks}ranks"
    settings = {
        "recipe_file": str(request.recipe),
        "recipe": json.loads(json.dumps(recipe, default=str)),
        "overrides": list(request.overrides),
        "steps": request.steps,
        "config": parsed,
    }
    arguments += ["--output_dir", str(directory)]
    return Case(template.name, num_ranks, num_nodes, directory, arguments, config, settings)


def _uses_cpu() -> bool:
    return not torch.accelerator.is_available() or is_true(os.environ.get("ACCELERATE_USE_CPU", "false"))


def _for_cpu(config: str) -> str:
    """Return a template for CPU ranks: device, precision and compiler, nothing else."""
    changed = yaml.safe_load(config) | {"use_cpu": True, "mixed_precision": "no"}
    changed.pop("dynamo_config", None)
    return yaml.safe_dump(changed, sort_keys=False)


def begin(case: Case) -> None:
    """Write what a case is about to be run with."""
    case.directory.mkdir(parents=True, exist_ok=True)
    (case.directory / METRICS_FILE).unlink(missing_ok=True)
    (case.directory / TEMPLATE_FILE).write_text(case.config, encoding="utf-8")
    facts = {"template": case.template, "num_ranks": case.num_ranks, "num_nodes": case.num_nodes}
    _write(case.directory, facts | {"settings": case.settings})


def end(case: Case, outcome: str, host_peak_bytes: int) -> None:
    """Add how a case ended: its outcome, and the peak of its largest process."""
    _write(case.directory, read(case.directory) | {"outcome": outcome, "host_peak_bytes": host_peak_bytes})


def read(directory: Path) -> dict[str, Any]:
    """Return what case.json says of a case, or nothing where there is none."""
    try:
        facts = json.loads((directory / CASE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _write(directory: Path, facts: dict[str, Any]) -> None:
    (directory / CASE_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def has_finished(directory: Path, steps: int) -> bool:
    """Tell whether a run's metrics say that it took all its steps."""
    return any(entry.get("ended_at_step") == steps for entry in read_metrics(directory / METRICS_FILE))
