"""A self-test's measurements and report. Each measurement launches its own ranks, so a crash does not end the others."""

import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import yaml

from hf_fsdp_recipes.checkpointing.layout import checksum, list_checkpoints
from hf_fsdp_recipes.checkpointing.resume import PACKAGES
from hf_fsdp_recipes.configs.validate import read_config
from hf_fsdp_recipes.environment import package_version
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, last_of_each_step, read_metrics
from hf_fsdp_recipes.tools.selftest.random_model import write_random_model, write_rows
from hf_fsdp_recipes.tools.subprocess_runner import SFT_SCRIPT, is_cpu_machine, launch

Figure = float | bool | str
Figures = dict[str, Figure]
OPTIONAL_PACKAGES = ("bitsandbytes", "liger-kernel", "flash-attn", "kernels", "triton")
ON_CPU = "CPU ranks over gloo: the checks are valid, but the figures say nothing about accelerators"
RANKS_SCRIPT = Path(__file__).with_name("ranks.py")
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
MEDIUM = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 32_000, "max_position_embeddings": 4096,
}  # fmt: skip
MEDIUM_DEVICE_BYTES = 16_000_000_000  # enough for MEDIUM, which needs 10 GB to train with a second copy of its state
NUM_LOG_LINES = 40  # number of lines that the report shows from the end of a failed launch's log
NUM_STEPS = 60
RECIPE = {
    "max_length": 64, "max_steps": NUM_STEPS, "save_steps": 10, "logging_steps": 1, "per_device_train_batch_size": 2,
    "learning_rate": 1.0e-3, "gradient_checkpointing": False, "attention": "eager", "full_determinism": True,
    "report_to": "none", "disable_tqdm": True, "verify_export": "off", "resume_from_checkpoint": "auto",
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """Where the measurements run, and how much they measure."""

    directory: Path  # for models, checkpoints and logs
    device: str | None = None  # name of the accelerators, or None for CPU ranks
    num_ranks: int = 2
    config: Mapping[str, int] = field(default_factory=lambda: TINY)  # config of the Llama that is loaded and saved
    copied_bytes: int = 16_000_000  # size of one copy between host and device
    num_tokens: int = 64  # tokens per micro-batch while saving
    num_batches: int = 1
    script: Path = SFT_SCRIPT
    # Value of time.monotonic() at which a measurement is killed.
    deadline: float = field(default_factory=lambda: time.monotonic() + 600)


@dataclass(frozen=True)
class Result:
    """What one measurement found: figures, whose names contain units (a bool is the result of a check), or an error."""

    name: str
    status: Literal["ok", "failed", "skipped"]
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    error: str = ""


def find_site(directory: Path, script: Path, deadline: float) -> Site:
    """Return where to measure: on all devices of this machine, or on two CPU ranks if `is_cpu_machine()`."""
    if is_cpu_machine():
        return Site(directory, script=script, deadline=deadline)
    accelerator = torch.accelerator.current_accelerator()
    found = torch.get_device_module(accelerator).get_device_properties(0)
    device_bytes = getattr(found, "total_memory", 0)
    device = f"{getattr(found, 'name', 'unnamed')} ({accelerator}), {device_bytes / 2**30:.1f} GiB"
    is_large = device_bytes >= MEDIUM_DEVICE_BYTES
    sizes: Any = {"config": MEDIUM, "copied_bytes": 10**9, "num_tokens": 4096, "num_batches": 4} if is_large else {}
    return Site(directory, device, torch.accelerator.device_count(), script=script, deadline=deadline, **sizes)


def measure(name: str, function: Callable[[Site], Figures], site: Site) -> Result:
    """Run one measurement; an error or a failed check becomes part of the result."""
    started, figures, error = time.monotonic(), {}, ""
    try:
        figures = function(site)
    except (RecipeError, OSError) as failure:
        error = str(failure)
    is_failed = bool(error) or any(value is False for value in figures.values())
    return Result(name, "failed" if is_failed else "ok", time.monotonic() - started, figures, error)


def run_on_ranks(
    site: Site, name: str, *, script: Path = RANKS_SCRIPT, precision: str | None = None, **options: object
) -> Figures:
    """Launch a measurement on all ranks and return its figures; raise RecipeError if a rank failed or time ran out."""
    with tempfile.TemporaryDirectory(dir=site.directory) as scratch:
        file = Path(scratch) / "figures.json"
        arguments = [name, json.dumps(options, default=str), str(file)]
        _launch(site, script, arguments, file.with_suffix(".log"), precision)
        return dict(json.loads(file.read_text()))


def _launch(
    site: Site,
    script: Path,
    arguments: list[str],
    log_file: Path,
    precision: str | None = None,
    is_enough: Callable[[], bool] = lambda: False,
) -> bool:
    """Run a script on all ranks. Kill the launcher and the ranks once `is_enough()` is true; return whether that happened."""
    config = read_config("fsdp2_cpu" if site.device is None else "fsdp2_full_shard")
    config |= {"num_processes": site.num_ranks} | ({"mixed_precision": precision} if precision else {})
    template = log_file.with_suffix(".yaml")
    template.write_text(yaml.safe_dump(config))
    with launch(template, script, arguments, log_file, on_cpu=site.device is None) as run:
        if run.wait(max(1.0, site.deadline - time.monotonic()), is_enough):
            return True
    if run.exit_status:
        last_lines = "\n".join(run.read_log().splitlines()[-NUM_LOG_LINES:])
        raise RecipeError(f"{run.describe_failure()}\n\n{last_lines}")
    return False


def measure_copies(site: Site) -> Figures:
    """Measure copies between host and device."""
    return run_on_ranks(site, "copies", num_bytes=site.copied_bytes)


def measure_load(site: Site) -> Figures:
    """Measure loading a checkpoint from the page cache, with the sources `rank0` and `direct`."""
    checkpoint, tiny = find_model(site, site.config), find_model(site, TINY)
    return run_on_ranks(site, "load", precision="no", checkpoint=checkpoint, tiny=tiny)


def measure_save(site: Site) -> Figures:
    """Measure saving during training, and compare the checkpoint with the state at the time of the save."""
    checkpoint = find_model(site, site.config)
    with tempfile.TemporaryDirectory(dir=site.directory) as directory:
        sizes: dict[str, Any] = {"num_tokens": site.num_tokens, "num_batches": site.num_batches}
        return run_on_ranks(site, "save", checkpoint=checkpoint, directory=directory, **sizes)


def find_model(site: Site, config: Mapping[str, int]) -> Path:
    """Return the directory of a random model; write the model if it does not exist yet."""
    model = site.directory / f"llama-{config['hidden_size']}x{config['num_hidden_layers']}"
    if not model.is_dir():
        part = model.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        write_random_model(dict(config), part)
        part.rename(model)
    return model


def train_kill_resume(site: Site) -> Figures:
    """Train a tiny model, kill a second run after its first checkpoint, resume it, and compare the two runs."""
    with tempfile.TemporaryDirectory(dir=site.directory) as name:
        directory = Path(name)
        write_random_model(TINY, directory / "model")
        write_rows(directory / "rows", num_rows=256, num_words=48)
        steady, killed = directory / "steady", directory / "killed"
        _train(site, steady)
        killed_at = _train(site, killed, is_killed=True)
        _train(site, killed)
        losses = [
            [entry["loss"] for entry in last_of_each_step(read_metrics(run / METRICS_FILE), "loss")]
            for run in (steady, killed)
        ]
        exports = [
            {file.name: checksum(file) for file in (run / "export").glob("*.safetensors")} for run in (steady, killed)
        ]
    return {
        "steps": NUM_STEPS,
        "killed after step": killed_at,
        "the resumed run has the same losses": losses[0] == losses[1] and len(losses[0]) == NUM_STEPS,
        "the resumed run has the same export": exports[0] == exports[1] and bool(exports[0]),
    }


def _train(site: Site, output: Path, is_killed: bool = False) -> int:
    """Train to the end or, if `is_killed`, kill the run after its first complete checkpoint; return the last logged step."""
    inputs = {"model_name_or_path": str(output.with_name("model")), "dataset_name": str(output.with_name("rows"))}
    recipe = output.with_name("recipe.yaml")
    recipe.write_text(yaml.safe_dump(RECIPE | inputs | {"output_dir": str(output)}))
    was_killed = _launch(
        site,
        site.script,
        ["--config", str(recipe)],
        output.with_suffix(".log"),
        is_enough=lambda: is_killed and any(found.is_complete for found in list_checkpoints(output)),
    )
    if is_killed and not was_killed:
        raise RecipeError("The run ended before it could be killed.")
    return max(entry.get("step", 0) for entry in read_metrics(output / METRICS_FILE))


MEASUREMENTS: dict[str, tuple[int, Callable[[Site], Figures]]] = {  # the number is the expected time in seconds
    "copies": (20, measure_copies),
    "load": (40, measure_load),
    "save": (60, measure_save),
    "train, kill, resume": (90, train_kill_resume),
}


def write_report(file: Path, title: str, device: str | None, num_ranks: int, results: Sequence[Result]) -> None:
    """Write a report with the machine, the versions, all figures, and the errors."""
    names = (*PACKAGES, *OPTIONAL_PACKAGES)
    versions = [f"{name} {found}" for name in names if (found := package_version(name))]
    memory = psutil.virtual_memory().total / 2**30
    lines = [
        f"# {title}",
        "",
        f"- ranks: {num_ranks}; {device or ON_CPU}",
        f"- host: {os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}, Python {platform.python_version()}",
        f"- versions: {', '.join(versions)}",
        "",
        "| measurement | figure | value |",
        "|---|---|---|",
    ]
    for result in results:
        lines.append(f"| {result.name} | {result.status} | {result.seconds:.0f} s |")
        lines += [f"| | {name} | {_format(value)} |" for name, value in result.figures.items()]
    for result in results:
        if result.error:
            lines += ["", f"{result.name}, {result.status}:", "", "```text", result.error, "```"]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def _format(value: Figure) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
