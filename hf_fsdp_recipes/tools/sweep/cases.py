"""The cases of a sweep: each is a template with a number of ranks.

case.json records a case's settings. A case that has a result runs again only if its settings change.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from hf_fsdp_recipes.configs import templates
from hf_fsdp_recipes.configs.shipped_files import read_recipe
from hf_fsdp_recipes.configs.validate import Section
from hf_fsdp_recipes.errors import PlanError, TemplateError
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE
from hf_fsdp_recipes.tools.subprocess_runner import is_cpu_machine
from hf_fsdp_recipes.units import count

CASE_FILE, TEMPLATE_FILE = "case.json", "template.yaml"
# Train and measure; save and export nothing.
MEASURE_ONLY = (
    "--logging_steps", "1", "--save_strategy", "no", "--eval_strategy", "no", "--load_best_model_at_end", "false",
    "--export", "false", "--report", "true", "--report_to", "none", "--push_to_hub", "false", "--disable_tqdm", "true",
)  # fmt: skip
ON_CPU = ("--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--tf32", "false")


@dataclass(frozen=True)
class Case:
    """One run of the recipe, with one template and one number of ranks."""

    template: str
    num_ranks: int
    num_nodes: int
    directory: Path  # the run's output directory
    settings: Section  # all settings that affect the measurement; `config` is the Accelerate config

    @property
    def name(self) -> str:
        """Template and rank count, for messages."""
        return f"{self.template} on {count(self.num_ranks, 'rank')}"

    @property
    def num_steps(self) -> int:
        """Optimizer steps to take."""
        return int(self.settings["steps"])

    @property
    def is_on_cpu(self) -> bool:
        """Whether the case trains on CPU ranks."""
        return bool(self.settings["config"].get("use_cpu"))

    @property
    def arguments(self) -> list[str]:
        """Arguments of recipes/sft.py."""
        arguments = ["--config", self.settings["recipe_file"], "--max_steps", str(self.num_steps), *MEASURE_ONLY]
        arguments += [*(ON_CPU if self.is_on_cpu else ()), *self.settings["overrides"]]
        return [*arguments, "--output_dir", str(self.directory)]

    def start_record(self) -> None:
        """Write the config and case.json, and remove the metrics of an earlier run."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / METRICS_FILE).unlink(missing_ok=True)
        config = yaml.safe_dump(self.settings["config"], sort_keys=False)
        (self.directory / TEMPLATE_FILE).write_text(config, encoding="utf-8")
        self._write({name: getattr(self, name) for name in ("template", "num_ranks", "num_nodes", "settings")})

    def finish_record(self, status: str, host_peak_bytes: int) -> None:
        """Add to case.json how the run ended, and the peak host memory of the run's largest process."""
        self._write(read_record(self.directory) | {"status": status, "host_peak_bytes": host_peak_bytes})

    def _write(self, record: Section) -> None:
        (self.directory / CASE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(directory: Path) -> Section:
    """Return the content of a case.json, or an empty dict if the file is missing or damaged."""
    try:
        record = json.loads((directory / CASE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def make_cases(
    recipe_file: Path,
    ranks: Sequence[int],
    template_names: Sequence[str],
    output: Path,
    num_steps: int,
    overrides: Sequence[str] = (),
    ranks_per_node: int | None = None,
) -> tuple[list[Case], list[str]]:
    """Return a case for each template and rank count (over all nodes), and the reasons why combinations were skipped.

    `overrides` are `--field value` pairs for the recipe; `ranks_per_node` is None for runs on this machine. Raises a
    PlanError or TemplateError if a template or number is wrong, or no combination is possible.
    """
    recipe = read_recipe(recipe_file, PlanError)
    if min(ranks) < 1 or num_steps < 1:
        raise PlanError(f"--ranks {list(ranks)} and --steps {num_steps}: every number must be at least 1.")
    is_local, num_devices = ranks_per_node is None, torch.accelerator.device_count()
    use_cpu = is_local and is_cpu_machine()
    if is_local and not use_cpu and max(ranks) > num_devices:
        raise PlanError(
            f"This machine has {num_devices} accelerators, too few for {max(ranks)} ranks. Use fewer ranks, or --submit "
            "on a cluster."
        )
    settings = {
        "recipe_file": str(recipe_file),
        "recipe": json.loads(json.dumps(recipe, default=str)),
        "overrides": list(overrides),
        "steps": num_steps,
    }
    cases, skipped = [], []
    for template in [templates.find_template(name) for name in dict.fromkeys(template_names)]:
        for num_ranks in sorted(set(ranks)):
            num_nodes = -(-num_ranks // (ranks_per_node or num_ranks))
            directory = output / f"{template.name}_{num_ranks}ranks"
            try:
                text = templates.render(replace(template, num_processes=num_ranks, num_machines=num_nodes))
            except TemplateError as error:
                skipped.append(f"{template.name} on {count(num_ranks, 'rank')}: {error}")
                continue
            config = yaml.safe_load(text)
            if use_cpu:
                from hf_fsdp_recipes.tools.rehearsal.tiny_recipe import to_cpu_ranks  # imports transformers and TRL

                config = to_cpu_ranks(config, num_ranks) | {"mixed_precision": "no"}
            cases.append(Case(template.name, num_ranks, num_nodes, directory, settings | {"config": config}))
    if not cases:
        raise PlanError(skipped[0] + (" Several nodes need --submit." if is_local else ""))
    return cases, skipped
