"""Builds the job that `hf-fsdp plan` plans. Options take precedence over the recipe, and the recipe over the defaults."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

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
# For each option, the field of Cluster or TrainingJob that it sets.
CLUSTER_FIELDS = {
    "gpus_per_node": "gpus_per_node",
    "gpu_memory": "gpu_bytes",
    "host_memory": "host_bytes",
    "interconnect": "node_bytes_per_second",
    "intra_node": "gpu_bytes_per_second",
    "gpu_tflops": "gpu_flops",
}
JOB_FIELDS = {"fused_loss": "loss", "lora": "lora_rank", "nested_scales": "has_nested_scales"}
PARSERS: dict[str, Callable[[Any], Any]] = {
    "gpu_memory": parse_bytes,
    "host_memory": parse_bytes,
    "interconnect": parse_bandwidth,
    "intra_node": parse_bandwidth,
    "gpu_tflops": lambda tflops: tflops * 1e12,
    "dtype": lambda name: parse_dtype(name) or torch.float32,
    "mixed_precision": parse_dtype,
    "reduce_dtype": lambda name: parse_dtype(name) or torch.float32,
    "fused_loss": lambda is_fused: "fused" if is_fused else "model",
    "lora_targets": lambda names: names if names == "all-linear" else tuple(filter(None, names.split(","))),
}
TRAINER_BATCH = 8  # Trainer's default per_device_train_batch_size


def flatten_arguments(arguments: "Arguments") -> dict[str, Any]:
    """Return parsed recipe arguments as one dict from recipe keys to values. Enums become their plain values."""
    keys = {key: getattr(value, "value", value) for part in reversed(arguments) for key, value in vars(part).items()}
    return keys | {"accelerator_config": arguments.training.accelerator_config.to_dict()}


def to_options(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `hf-fsdp plan` that correspond to a recipe's keys."""
    options = {option: keys[key] for key, option in OPTION_OF_KEY.items() if keys.get(key) is not None}
    options.setdefault("batch", TRAINER_BATCH)
    if keys.get("use_peft"):
        parameters = keys.get("lora_target_parameters") or ()
        targets = keys.get("lora_target_modules") or ("" if parameters else "all-linear")
        options["lora"] = keys.get("lora_r", 16)
        options["lora_parameters"] = (parameters,) if isinstance(parameters, str) else tuple(parameters)
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
    for kind in ("flash", "eager"):
        if kind in implementation:
            return kind
    # Rows of different lengths are padded, and padding needs a mask.
    return "sdpa" if keys.get("packing") or batch == 1 else "sdpa_padded"


def make_job(strategy: Strategy, options: dict[str, Any]) -> TrainingJob:
    """Build a job from a template's strategy and the options that were given; raise PlanError if a value is invalid."""
    given = {"mixed_precision": strategy.precision} | {k: value for k, value in options.items() if value is not None}
    if given.get("quantized", "4bit") != "4bit":
        raise PlanError(f"quantized is {given['quantized']!r}; only 4bit is supported.")
    for name in [name for name in PARSERS if name in given]:
        try:
            given[name] = PARSERS[name](given[name])
        except ValueError as error:
            raise PlanError(f"{name}: {error}.") from error
    num_gpus = given.get("gpus", strategy.num_processes)
    template_ranks_per_node = max(1, strategy.num_processes // strategy.num_machines)
    cluster: dict[str, Any] = {"gpu_bytes": None} if strategy.on_cpu else {}
    cluster |= {field: given[name] for name, field in CLUSTER_FIELDS.items() if name in given}
    cluster.setdefault("gpus_per_node", min(num_gpus, template_ranks_per_node))
    job = {name: given[name] for name in TrainingJob.__dataclass_fields__ if name in given}
    job |= {field: given[name] for name, field in JOB_FIELDS.items() if name in given}
    return TrainingJob(strategy, Cluster(num_gpus, **cluster), **job, is_4bit="quantized" in given)
