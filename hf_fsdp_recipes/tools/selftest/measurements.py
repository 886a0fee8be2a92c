"""The measurements of a self-test. Each launches ranks or runs of its own, so a crash of one does not end the others."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from hf_fsdp_recipes.checkpointing.layout import checksum, list_checkpoints
from hf_fsdp_recipes.configs.templates import template_directory
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.metrics.metrics_file import METRICS_FILE, read_metrics
from hf_fsdp_recipes.tools.selftest.random_model import write_random_model, write_rows
from hf_fsdp_recipes.tools.subprocess_runner import SFT_SCRIPT, launch

Figures = dict[str, Any]
RANKS_SCRIPT = Path(__file__).with_name("ranks.py")
BYTES_PER_PARAMETER = 2 + 2 * 12  # a bf16 model, and two fp32 checkpoints with AdamW's moments


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        config: fields of the LlamaConfig of the model that is loaded and saved.
        copied_bytes: of one copy between host and device.
        num_tokens, num_batches: of a training step during a save.
    """

    config: Mapping[str, Any]
    copied_bytes: int
    num_tokens: int
    num_batches: int


TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
MEDIUM = TINY | {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 32_000, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL_SIZES = Sizes(TINY, 16_000_000, 64, 1)
MEDIUM_SIZES = Sizes(MEDIUM, 1_000_000_000, 4096, 4)
MEDIUM_DEVICE_BYTES = 16_000_000_000  # MEDIUM takes 10 GB
RECIPE = {
    "max_length": 64, "max_steps": 60, "save_steps": 10, "logging_steps": 1, "per_device_train_batch_size": 2,
    "learning_rate": 1.0e-3, "gradient_checkpointing": False, "attention": "eager", "full_determinism": True,
    "report_to": "none", "disable_tqdm": True, "verify_export": "off", "resume_from_checkpoint": "auto",
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """Where measurements run.

    Attributes:
        directory: for models, checkpoints and logs.
        on_cpu: whether the ranks are CPU ranks.
        num_ranks: on this machine.
        sizes: how much is measured.
        script: recipes/sft.py.
        deadline: `time.monotonic()` at which measurements are killed.
    """

    directory: Path
    on_cpu: bool
    num_ranks: int
    sizes: Sizes = SMALL_SIZES
    script: Path = SFT_SCRIPT
    deadline: float = field(default_factory=lambda: time.monotonic() + 600)


@dataclass(frozen=True)
class Result:
    """What one measurement found.

    Attributes:
        figures: by name, with units; a bool is a check.
        error: why there are no figures, or too few.
    """

    name: str
    status: Literal["ok", "failed", "skipped"]
    seconds: float
    figures: Figures = field(default_factory=dict)
    error: str = ""


def find_site(directory: Path) -> Site:
    """Return a site with all devices of this machine, or with two CPU ranks if there are none or CPU ranks are requested."""
    import os

    on_cpu = is_true(os.environ.get("ACCELERATE_USE_CPU", "false")) or not torch.accelerator.is_available()
    return Site(directory, on_cpu, 2 if on_cpu else torch.accelerator.device_count())


def measure(name: str, function: Callable[[Site], Figures], site: Site) -> Result:
    """Run one measurement; an error or a failed check becomes part of the result."""
    started, figures, error = time.monotonic(), {}, ""
    try:
        figures = function(site)
    except (RecipeError, OSError) as failure:
        error = str(failure)
    is_failed = error or False in figures.values()
    return Result(name, "failed" if is_failed else "ok", time.monotonic() - started, figures, error)


def run_on_ranks(
    site: Site, name: str, *, script: Path = RANKS_SCRIPT, precision: str | None = None, **options: Any
) -> Figures:
    """Launch a measurement on all ranks; return its figures.

    Raises:
        RecipeError: a rank failed, or the time is over.
    """
    scratch = Path(tempfile.mkdtemp(dir=site.directory))
    arguments = [name, json.dumps(options, default=str), str(scratch / "figures.json")]
    with launch(
        write_template(site, scratch, precision), script, arguments, scratch / "log", on_cpu=site.on_cpu
    ) as run:
        wait(run, site)
        if run.exit_status:
            raise RecipeError(run.describe_failure())
    return dict(json.loads((scratch / "figures.json").read_text()))


def wait(run: Any, site: Site, condition: Callable[[], bool] = lambda: False) -> None:
    """Wait until a condition is met or the run exits.

    Raises:
        RecipeError: the time is over.
    """
    try:
        for _ in run.poll(max(1.0, site.deadline - time.monotonic())):
            if condition():
                return
    except TimeoutError as error:
        raise RecipeError(f"The time is over, and the run is {error}.") from error


def write_template(site: Site, directory: Path, precision: str | None = None) -> Path:
    """Write a shipped template with this machine's number of ranks and, if given, another mixed precision."""
    name = "fsdp2_cpu" if site.on_cpu else "fsdp2_full_shard"
    config = yaml.safe_load((template_directory() / f"{name}.yaml").read_text())
    config |= {"num_processes": site.num_ranks} | ({"mixed_precision": precision} if precision else {})
    (directory / "template.yaml").write_text(yaml.safe_dump(config))
    return directory / "template.yaml"


def describe_devices(site: Site) -> Figures:
    """Return the name and memory of the devices."""
    return {"ranks": site.num_ranks, **run_on_ranks(site, "devices")}


def choose_sizes(site: Site, figures: Figures) -> Site:
    """Return the site with the sizes that its devices have memory for."""
    is_large = figures.get("memory, bytes", 0) >= MEDIUM_DEVICE_BYTES
    return replace(site, sizes=MEDIUM_SIZES if is_large else SMALL_SIZES)


def measure_copies(site: Site) -> Figures:
    """Measure copies between host and device."""
    return run_on_ranks(site, "copies", num_bytes=site.sizes.copied_bytes)


def measure_load(site: Site) -> Figures:
    """Load a checkpoint from the page cache, through rank 0 and directly."""
    return run_on_ranks(site, "load", precision="no", checkpoint=find_model(site))


def measure_save(site: Site) -> Figures:
    """Save during training, and compare the checkpoint with the state at the save."""
    sizes, model = site.sizes, find_model(site)
    with tempfile.TemporaryDirectory(dir=site.directory) as directory:
        options = {"num_tokens": sizes.num_tokens, "num_batches": sizes.num_batches}
        return run_on_ranks(site, "save", checkpoint=model, directory=directory, **options)


def find_model(site: Site) -> Path:
    """Return the directory of the random model that is loaded and saved; write it if it is not there.

    Raises:
        RecipeError: the disk is too small for the model and its checkpoints.
    """
    shape = json.dumps(dict(site.sizes.config), sort_keys=True)
    model = site.directory / f"model-{site.sizes.config['hidden_size']}x{site.sizes.config['num_hidden_layers']}"
    if (model / "shape.json").is_file() and (model / "shape.json").read_text() == shape:
        return model
    config = site.sizes.config
    per_layer = config["hidden_size"] * (4 * config["hidden_size"] + 3 * config["intermediate_size"])
    num_parameters = config["num_hidden_layers"] * per_layer + 2 * config["vocab_size"] * config["hidden_size"]
    needed, free = num_parameters * BYTES_PER_PARAMETER, shutil.disk_usage(site.directory).free
    if free < needed:
        raise RecipeError(
            f"{site.directory} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed. Free some."
        )
    shutil.rmtree(model, ignore_errors=True)
    write_random_model(dict(config), model)
    (model / "shape.json").write_text(shape)
    return model


def train_kill_resume(site: Site) -> Figures:
    """Train a tiny model, kill a second run after its first checkpoint, resume it, and compare the two."""
    with tempfile.TemporaryDirectory(dir=site.directory) as name:
        directory = Path(name)
        write_random_model(TINY, directory / "model")
        write_rows(directory / "rows", num_rows=256, num_words=48)
        _train(site, directory, "steady")
        killed_at = _train(site, directory, "killed", is_killed=True)
        _train(site, directory, "killed")
        runs = [directory / run for run in ("steady", "killed")]
        losses = [{e["step"]: e["loss"] for e in read_metrics(r / METRICS_FILE) if "loss" in e} for r in runs]
        exports = [{f.name: checksum(f) for f in (r / "export").glob("*.safetensors")} for r in runs]
        return {
            "steps": RECIPE["max_steps"],
            "killed after step": killed_at,
            "the resumed run has the same losses": losses[0] == losses[1] and len(losses[0]) == RECIPE["max_steps"],
            "the resumed run has the same export": exports[0] == exports[1] and bool(exports[0]),
        }


def _train(site: Site, directory: Path, name: str, is_killed: bool = False) -> int:
    """Train, or kill launcher and ranks once a checkpoint is complete; return the last logged step."""
    output = directory / name
    settings = RECIPE | {"model_name_or_path": str(directory / "model"), "dataset_name": str(directory / "rows")}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(settings | {"output_dir": str(output)}))
    arguments = ["--config", str(directory / "recipe.yaml")]
    template = write_template(site, directory)

    def has_checkpoint() -> bool:
        return is_killed and any(found.is_complete for found in list_checkpoints(output))

    with launch(template, site.script, arguments, directory / f"{name}.log", on_cpu=site.on_cpu) as run:
        wait(run, site, has_checkpoint)
        if run.exit_status or (is_killed and run.exit_status is not None):
            raise RecipeError(run.describe_failure() if run.exit_status else "The run ended before it could be killed.")
    return max(entry.get("step", 0) for entry in read_metrics(output / METRICS_FILE))


MEASUREMENTS: dict[str, tuple[int, Callable[[Site], Figures]]] = {  # with the seconds that each is expected to take
    "copies": (20, measure_copies),
    "load": (40, measure_load),
    "save": (60, measure_save),
    "train, kill, resume": (90, train_kill_resume),
}
