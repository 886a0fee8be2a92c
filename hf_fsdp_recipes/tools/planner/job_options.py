"""Build the job to plan from command-line options, a recipe's keys and TRL's defaults, in this order."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from hf_fsdp_recipes.configs.strategy import Strategy
from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.precision import parse_dtype
from hf_fsdp_recipes.tools.planner.training_job import Cluster, TrainingJob
from hf_fsdp_recipes.units import parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    from hf_fsdp_recipes.training.arguments import Arguments

OPTION_OF_KEY = {
    "model_name_or_path": "model",
    "per_device_train_batch_size": "batch",
    "max_length": "length",
    "gradient_accumulation_steps": "accumulation",
    "optim": "optimizer",
    "dtype": "dtype",
    "reduce_dtype": "reduce_dtype",
    "gradient_checkpointing": "gradient_checkpointing",
}
TRAINER_BATCH = 8  # Trainer's default per_device_train_batch_size


def read_recipe(file: Path) -> dict[str, Any]:
    """Return a recipe's keys and values.

    Raises:
        PlanError: the file cannot be read or is not a YAML mapping.
    """
    try:
        keys = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PlanError(f"The recipe {file} cannot be read: {error}.") from error
    if not isinstance(keys, dict):
        raise PlanError(f"The recipe {file} is not a mapping of keys to values.")
    return keys


def flatten_arguments(arguments: "Arguments") -> dict[str, Any]:
    """Return the fields of parsed recipe arguments as one dict of recipe keys, with plain values for enums."""
    keys = {key: getattr(value, "value", value) for part in reversed(arguments) for key, value in vars(part).items()}
    return keys | {"accelerator_config": arguments.training.accelerator_config.to_dict()}


def to_options(keys: dict[str, Any]) -> dict[str, Any]:
    """Translate the recipe keys that are set into options of `hf-fsdp plan`."""
    options = {option: keys[key] for key, option in OPTION_OF_KEY.items() if keys.get(key) is not None}
    options.setdefault("batch", TRAINER_BATCH)
    if keys.get("use_peft"):
        targets = keys.get("lora_target_modules") or "all-linear"
        options["lora"] = keys.get("lora_r", 16)
        options["lora_targets"] = targets if isinstance(targets, str) else ",".join(targets)
    if keys.get("load_in_4bit"):
        options |= {"quantized": "4bit", "nested_scales": bool(keys.get("use_bnb_nested_quant"))}
    if keys.get("config_name"):
        options |= {"model": keys["config_name"], "config_overrides": keys.get("config_overrides")}
    accelerator = keys.get("accelerator_config") or {}
    options["sync_each_batch"] = (accelerator.get("gradient_accumulation_kwargs") or {}).get("sync_each_batch", False)
    options["attention"] = _attention(keys, options["batch"])
    return options


def _attention(keys: dict[str, Any], batch: int) -> str:
    implementation = str(keys.get("attn_implementation") or keys.get("attention") or "sdpa")
    if "flash" in implementation:
        return "flash"
    if implementation == "eager":
        return "eager"
    # Rows of different lengths are padded, and padding needs a mask.
    return "sdpa" if keys.get("packing") or batch == 1 else "sdpa_padded"


def make_job(strategy: Strategy, options: dict[str, Any]) -> TrainingJob:
    """Build a job from a template's strategy and the options that were given.

    Raises:
        PlanError: an option has an invalid value, or options contradict each other.
    """
    quantized = options.get("quantized")
    if quantized not in (None, "4bit"):
        raise PlanError(f"quantized is {quantized!r}; only 4bit is supported.")
    options = {"mixed_precision": strategy.precision} | options
    targets = options.get("lora_targets", "all-linear")
    fields = {name: options[name] for name in TrainingJob.__dataclass_fields__ if name in options}
    return TrainingJob(
        **fields
        | {
            "strategy": strategy,
            "cluster": _cluster(strategy, options),
            "dtype": _parse(parse_dtype, options, "dtype") or torch.float32,
            "mixed_precision": _parse(parse_dtype, options, "mixed_precision"),
            "reduce_dtype": _parse(parse_dtype, options, "reduce_dtype") or torch.float32,
            "loss": "fused" if options.get("fused_loss", True) else "model",
            "lora_rank": options.get("lora", 0),
            "lora_targets": targets if targets == "all-linear" else tuple(targets.split(",")),
            "is_4bit": quantized == "4bit",
            "has_nested_scales": options.get("nested_scales", False),
        }
    )


def _cluster(strategy: Strategy, options: dict[str, Any]) -> Cluster:
    num_gpus = options.get("gpus", strategy.num_processes)
    template_ranks_per_node = max(1, strategy.num_processes // strategy.num_machines)
    fields: dict[str, Any] = {
        "num_gpus": num_gpus,
        "gpus_per_node": options.get("gpus_per_node", min(num_gpus, template_ranks_per_node)),
    }
    if strategy.on_cpu:
        fields["gpu_bytes"] = None
    for option, name, parse in (
        ("gpu_memory", "gpu_bytes", parse_bytes),
        ("host_memory", "host_bytes", parse_bytes),
        ("interconnect", "node_bytes_per_second", parse_bandwidth),
        ("intra_node", "gpu_bytes_per_second", parse_bandwidth),
    ):
        if options.get(option) is not None:
            fields[name] = _parse(parse, options, option)
    if options.get("gpu_tflops") is not None:
        fields["gpu_flops"] = options["gpu_tflops"] * 1e12
    return Cluster(**fields)


def _parse(parse: Callable[[str], Any], options: dict[str, Any], name: str) -> Any:
    if options.get(name) is None:
        return None
    try:
        return parse(options[name])
    except ValueError as error:
        raise PlanError(f"{name}: {error}.") from error
