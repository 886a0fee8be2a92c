"""What a person asks to be planned: the command line's options over a recipe's keys over TRL's defaults."""

from pathlib import Path
from typing import Any

import torch
import yaml

from hf_fsdp_recipes.errors import PlanError
from hf_fsdp_recipes.tools.planner.job import Job, Machine, parse_bandwidth, parse_bytes, parse_dtype
from hf_fsdp_recipes.tools.planner.strategy import Strategy, find_strategy

# A recipe's keys, and what they are called here.
RECIPE_KEYS = {
    "model_name_or_path": "model",
    "per_device_train_batch_size": "batch",
    "max_length": "length",
    "gradient_accumulation_steps": "accumulation",
    "optim": "optimizer",
    "dtype": "dtype",
    "gradient_checkpointing": "checkpointing",
}
ATTENTION = {"flash_attention_2": "flash", "flash_attention_3": "flash", "flash": "flash", "eager": "eager"}


def read_recipe(file: Path) -> dict[str, Any]:
    """Read the keys of a recipe that matter here, under the names of the command's options.

    Raises:
        PlanError: no such file, or not a mapping.
    """
    try:
        keys = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PlanError(f"{file} cannot be read: {error}.") from error
    if not isinstance(keys, dict):
        raise PlanError(f"{file} holds no mapping of keys to values.")
    return _options(keys)


def options_of(arguments: Any) -> dict[str, Any]:
    """Return the options of a recipe that has been parsed, whatever the command line changed of it."""
    keys = {key: getattr(value, "value", value) for part in reversed(arguments) for key, value in vars(part).items()}
    keys["accelerator_config"] = arguments.training.accelerator_config.to_dict()
    return _options(keys)


def _options(keys: dict[str, Any]) -> dict[str, Any]:
    options = {ours: keys[theirs] for theirs, ours in RECIPE_KEYS.items() if keys.get(theirs) is not None}
    options.setdefault("batch", 8)  # Trainer's own default
    if keys.get("use_peft"):
        targets = keys.get("lora_target_modules") or "all-linear"
        options |= {
            "lora": keys.get("lora_r", 16),
            "lora_targets": targets if isinstance(targets, str) else ",".join(targets),
        }
    if keys.get("load_in_4bit"):
        options |= {"quantized": "4bit", "nested_scales": bool(keys.get("use_bnb_nested_quant"))}
    if keys.get("config_name"):
        options |= {"model": keys["config_name"], "config_overrides": keys.get("config_overrides")}
    accelerator = keys.get("accelerator_config") or {}
    options["sync_each_batch"] = (accelerator.get("gradient_accumulation_kwargs") or {}).get("sync_each_batch", False)
    options["attention"] = _attention(keys, options["batch"])
    return options


def _attention(keys: dict[str, Any], batch: int) -> str:
    """Rows of different lengths are padded and need a mask, unless they are packed or alone."""
    wish = str(keys.get("attn_implementation") or keys.get("attention") or "sdpa")
    if wish in ATTENTION:
        return ATTENTION[wish]
    return "flash" if "flash" in wish else "sdpa" if keys.get("packing") or batch == 1 else "sdpa_padded"


def make_job(template: str | Strategy, options: dict[str, Any]) -> Job:
    """Join options into a job.

    Args:
        template: a shipped template's name, an Accelerate config's path, or what was read from one.
        options: by name, without those that were not given.

    Raises:
        PlanError, TemplateError: a value that cannot be read, or that cannot be together with another.
    """
    strategy = find_strategy(template) if isinstance(template, str) else template
    quantized = options.get("quantized")
    if quantized not in (None, "4bit"):
        raise PlanError(f"quantized: {quantized!r}. Rule: 4bit, or nothing.")
    precision = parse_dtype(options.get("mixed_precision", strategy.precision))
    dtype = parse_dtype(options.get("dtype")) or torch.float32
    targets = options.get("lora_targets", "all-linear")
    return Job(
        strategy=strategy,
        machine=_machine(strategy, options),
        batch=options.get("batch", 1),
        length=options.get("length", 1024),
        accumulation=options.get("accumulation", 1),
        dtype=dtype,
        mixed_precision=precision,
        optimizer=options.get("optimizer", "adamw_torch_fused"),
        checkpointing=options.get("checkpointing", True),
        attention=options.get("attention", "sdpa"),
        loss="fused" if options.get("fused_loss", True) else "model",
        lora_rank=options.get("lora", 0),
        lora_targets=targets if targets == "all-linear" else tuple(targets.split(",")),
        is_4bit=quantized == "4bit",
        has_nested_scales=options.get("nested_scales", False),
        sync_each_batch=options.get("sync_each_batch", False),
    )


def _machine(strategy: Strategy, options: dict[str, Any]) -> Machine:
    num_gpus = options.get("gpus", strategy.usual_gpus)
    per_node = options.get("gpus_per_node", min(num_gpus, max(1, strategy.usual_gpus // strategy.usual_nodes)))
    given: dict[str, Any] = {"num_gpus": num_gpus, "gpus_per_node": per_node}
    if strategy.on_cpu:
        given["gpu_bytes"] = None
    for option, name, read in (
        ("gpu_memory", "gpu_bytes", parse_bytes),
        ("host_memory", "host_bytes", parse_bytes),
        ("interconnect", "node_bytes_per_second", parse_bandwidth),
        ("intra_node", "gpu_bytes_per_second", parse_bandwidth),
    ):
        if options.get(option) is not None:
            given[name] = read(options[option])
    if options.get("gpu_tflops") is not None:
        given["gpu_flops"] = options["gpu_tflops"] * 1e12
    return Machine(**given)
