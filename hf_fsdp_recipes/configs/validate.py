"""Finds every fault of an Accelerate FSDP config at once, before a rank is started.

Knows which keys exist, which belong to which FSDP version, and which combinations only fail (or silently do
something else) hours into a run. Imports torch only to look up a model's layer classes.

Source: accelerate 1.15 `commands/config/config_args.py`, `commands/launch.py`, `parallelism_config.py`.
"""

from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from hf_fsdp_recipes.errors import TemplateError

TOP_KEYS = frozenset(
    [
        "compute_environment",
        "command_file",
        "commands",
        "debug",
        "deepspeed_config",
        "distributed_type",
        "downcast_bf16",
        "dynamo_config",
        "enable_cpu_affinity",
        "fp8_config",
        "fsdp_config",
        "gpu_ids",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "megatron_lm_config",
        "mixed_precision",
        "mpirun_config",
        "num_machines",
        "num_processes",
        "parallelism_config",
        "rdzv_backend",
        "same_network",
        "tpu_env",
        "tpu_name",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "tpu_vm",
        "tpu_zone",
        "use_cpu",
        "dynamo_backend",
        "fp16",
    ]
)
FSDP_KEYS = frozenset(
    [
        "fsdp_version",
        "fsdp_offload_params",
        "fsdp_min_num_params",
        "fsdp_sharding_strategy",
        "fsdp_reshard_after_forward",
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_backward_prefetch",
        "fsdp_state_dict_type",
        "fsdp_forward_prefetch",
        "fsdp_use_orig_params",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_sync_module_states",
        "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload",
        "fsdp_ignored_modules",
    ]
)
FSDP1_ONLY = {
    "fsdp_sharding_strategy": "use fsdp_reshard_after_forward (true is FULL_SHARD, false SHARD_GRAD_OP)",
    "fsdp_backward_prefetch": "drop it, FSDP2 prefetches by itself",
    "fsdp_forward_prefetch": "drop it, FSDP2 refuses it",
    "fsdp_use_orig_params": "drop it, FSDP2 always keeps the original parameters",
    "fsdp_sync_module_states": "drop it, FSDP2 does not need it",
}
PARALLELISM_KEYS = frozenset(
    [
        "parallelism_config_dp_replicate_size",
        "parallelism_config_dp_shard_size",
        "parallelism_config_tp_size",
        "parallelism_config_cp_size",
        "parallelism_config_cp_backend",
        "parallelism_config_cp_comm_strategy",
        "parallelism_config_sp_size",
        "parallelism_config_sp_backend",
        "parallelism_config_sp_seq_length",
        "parallelism_config_sp_seq_length_is_variable",
        "parallelism_config_sp_attn_implementation",
    ]
)
CHOICES = {
    "fsdp_sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
}
PARALLEL_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
# transformers 5 loads the whole model on every rank whatever this flag says (transformers issue 43749).
IGNORES_EFFICIENT_LOADING_FROM = 5


def read_config(file: Path) -> dict[str, Any]:
    """Read a config file as a mapping.

    Raises:
        TemplateError: no such file, not YAML, or not a mapping.
    """
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TemplateError(f"{file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TemplateError(f"{file} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise TemplateError(f"{file} holds no mapping of keys to values.")
    return config


def find_faults(config: dict[str, Any], model_classes: Collection[str] | None = None) -> list[str]:
    """Return all faults of a config, each as value, rule and remedy; an empty list if there are none.

    Args:
        config: the parsed YAML.
        model_classes: names of the module classes of the model to be trained, to check wrap classes against.
    """
    fsdp = _with_prefix(config.get("fsdp_config"), "fsdp_")
    parallel = _with_prefix(config.get("parallelism_config"), "parallelism_config_")
    return [
        *_unknown_keys(config, fsdp, parallel),
        *_launch_faults(config),
        *_version_faults(fsdp, parallel),
        *_choice_faults(fsdp),
        *_wrap_faults(fsdp, model_classes),
        *_saving_and_loading_faults(fsdp),
        *_hybrid_faults(config, fsdp, parallel),
    ]


def module_classes(model: str) -> set[str]:
    """Return the names of all module classes of a model, from its config alone.

    Raises:
        TemplateError: the config cannot be read or built.
    """
    return {type(module).__name__ for module in build_on_meta(model).modules()}


def build_on_meta(model: str, trust_remote_code: bool = False) -> Any:
    """Build a model from its config alone, without memory for its parameters.

    Raises:
        TemplateError: the config cannot be read or built.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        with torch.device("meta"):  # init_empty_weights allocates each parameter for a moment: 64 GB, if it is large
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise TemplateError(f"the config of {model} cannot be read: {str(error).splitlines()[0]}") from error


def is_true(value: Any) -> bool:
    """Read a YAML flag as Accelerate does, which accepts strings as well."""
    return str(value).lower() in ("true", "1", "yes", "on", "y", "t")


def _with_prefix(section: Any, prefix: str) -> dict[str, Any]:
    # Accelerate adds the prefix to FSDP keys that lack it.
    if not isinstance(section, dict):
        return {}
    return {(key if str(key).startswith(prefix) else prefix + str(key)): value for key, value in section.items()}


def _unknown_keys(config: dict[str, Any], fsdp: dict[str, Any], parallel: dict[str, Any]) -> Iterator[str]:
    for where, keys, known in (
        ("the file", config, TOP_KEYS),
        ("fsdp_config", fsdp, FSDP_KEYS),
        ("parallelism_config", parallel, PARALLELISM_KEYS),
    ):
        for key in sorted(set(map(str, keys)) - known):
            yield f"{key} in {where}: Accelerate has no such key. Remedy: {_nearest(key, known)}."


def _nearest(key: str, known: Collection[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else "remove it"


def _launch_faults(config: dict[str, Any]) -> Iterator[str]:
    if config.get("distributed_type") != "FSDP":
        yield (
            f"distributed_type: {config.get('distributed_type')}. Rule: FSDP, or the ranks train without sharding. "
            f"Remedy: distributed_type: FSDP."
        )
    if str(config.get("mixed_precision", "no")) not in ("no", "fp16", "bf16", "fp8", "False"):
        yield f"mixed_precision: {config['mixed_precision']}. Rule: 'no', fp16, bf16 or fp8."
    machines, processes = config.get("num_machines", 1), config.get("num_processes")
    if isinstance(machines, int) and isinstance(processes, int) and processes > 0 and processes % max(machines, 1):
        yield f"num_processes: {processes} over num_machines: {machines}. Rule: all nodes have as many ranks."


def _version_faults(fsdp: dict[str, Any], parallel: dict[str, Any]) -> Iterator[str]:
    chosen = str(fsdp.get("fsdp_version", "1"))
    if chosen not in ("1", "2"):
        yield f"fsdp_version: {chosen}. Rule: 1 or 2."
    if chosen == "2":
        for key in sorted(FSDP1_ONLY.keys() & fsdp.keys()):
            yield f"{key} is a key of FSDP1 and the file says fsdp_version 2. Remedy: {FSDP1_ONLY[key]}."
        value = str(fsdp.get("fsdp_reshard_after_forward", "true")).lower()
        if value not in ("true", "false"):
            yield f"fsdp_reshard_after_forward: {value}. Rule: true or false with FSDP2."
    elif chosen == "1":
        if parallel:
            yield "parallelism_config needs fsdp_version 2. Remedy: fsdp_sharding_strategy: HYBRID_SHARD, or FSDP2."
        if is_true(fsdp.get("fsdp_activation_checkpointing_offload", False)):
            yield "fsdp_activation_checkpointing_offload needs fsdp_version 2."


def _choice_faults(fsdp: dict[str, Any]) -> Iterator[str]:
    for key, choices in CHOICES.items():
        value = fsdp.get(key)
        if value is not None and str(value).upper() not in choices and not str(value).isdigit():
            yield f"{key}: {value}. Rule: one of {', '.join(choices)}."


def _wrap_faults(fsdp: dict[str, Any], model_classes: Collection[str] | None) -> Iterator[str]:
    policy = str(fsdp.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper()
    if policy == "NO_WRAP":
        yield (
            "fsdp_auto_wrap_policy is not set: the whole model is one unit and every rank gathers all of it. "
            "Remedy: TRANSFORMER_BASED_WRAP."
        )
    if policy == "SIZE_BASED_WRAP" and not fsdp.get("fsdp_min_num_params", 1):
        yield "fsdp_min_num_params: 0 turns wrapping off. Remedy: 100000000."
    classes = fsdp.get("fsdp_transformer_layer_cls_to_wrap")
    names = [name.strip() for name in str(classes).split(",")] if classes else []
    for name in names if model_classes is not None else []:
        if name not in model_classes:  # type: ignore[operator]
            layers = sorted(c for c in model_classes if c.endswith(("Layer", "Block")))  # type: ignore[union-attr]
            yield (
                f"fsdp_transformer_layer_cls_to_wrap: {name} is no class of this model. Remedy: one of "
                f"{', '.join(layers)}, or drop the key to take what the model declares."
            )


def _saving_and_loading_faults(fsdp: dict[str, Any]) -> Iterator[str]:
    state_dict_type = str(fsdp.get("fsdp_state_dict_type", "SHARDED_STATE_DICT")).upper()
    if state_dict_type in ("FULL_STATE_DICT", "LOCAL_STATE_DICT"):
        yield (
            f"fsdp_state_dict_type: {state_dict_type}. Rule: SHARDED_STATE_DICT for intermediate saves (FULL gathers the "
            f"model and optimizer on rank 0 and times out; LOCAL cannot be resumed on other ranks). The whole model is "
            f"exported at the end anyway."
        )
    try:
        major = int(version("transformers").split(".")[0])
    except PackageNotFoundError:  # the check also serves people who only have the package's files
        return
    if is_true(fsdp.get("fsdp_cpu_ram_efficient_loading", False)) and major >= IGNORES_EFFICIENT_LOADING_FROM:
        yield (
            f"fsdp_cpu_ram_efficient_loading: true, and transformers {version('transformers')} ignores it: every rank "
            f"loads the whole model. Remedy: false, and load with hf_fsdp_recipes.load_model (recipes/sft.py does)."
        )


def _hybrid_faults(config: dict[str, Any], fsdp: dict[str, Any], parallel: dict[str, Any]) -> Iterator[str]:
    processes, machines = config.get("num_processes"), config.get("num_machines", 1)
    if "HYBRID" in str(fsdp.get("fsdp_sharding_strategy", "")).upper() and machines == 1:
        yield f"{fsdp['fsdp_sharding_strategy']} with num_machines: 1. Rule: FSDP1 copies the model between nodes."
    if not parallel or not isinstance(processes, int):
        return
    product = 1
    for size in PARALLEL_SIZES:
        product *= int(parallel.get(f"parallelism_config_{size}_size", 1))
    if product != processes:
        sizes = {
            key.removeprefix("parallelism_config_"): value for key, value in parallel.items() if key.endswith("_size")
        }
        yield (
            f"{sizes} multiply to {product} and num_processes is {processes}. Rule: the mesh has one place a rank. "
            f"Remedy: dp_replicate_size = nodes, dp_shard_size = ranks a node."
        )
