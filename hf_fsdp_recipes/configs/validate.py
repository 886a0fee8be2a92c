"""Validates Accelerate FSDP configs, and reports all faults together before any rank starts.

Accelerate defines which keys and values exist. The rules here reject keys of the other FSDP version, and
combinations that fail hours into a run or silently do something else than intended.

Source: accelerate 1.15 `commands/config/config_args.py`, `commands/launch.py`, `parallelism_config.py`.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_fsdp_recipes import model_class
from hf_fsdp_recipes.configs.model_configs import find_config
from hf_fsdp_recipes.configs.shipped_files import find_file
from hf_fsdp_recipes.configs.templates import MAIN_PROCESS_IP, find_template, render
from hf_fsdp_recipes.configs.yaml_file import read_yaml
from hf_fsdp_recipes.environment import is_true
from hf_fsdp_recipes.errors import LoadError, TemplateError, summarize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Section = dict[str, Any]  # a parsed config, or a section of one
UNSUPPORTED_PARALLELISM = {"tp_size": "Tensor", "cp_size": "Context", "sp_size": "Sequence"}
FSDP1_ONLY = {
    "fsdp_sharding_strategy": "Use fsdp_reshard_after_forward: true for FULL_SHARD, false for SHARD_GRAD_OP.",
    "fsdp_backward_prefetch": "Remove it; FSDP2 prefetches by itself.",
    "fsdp_forward_prefetch": "Remove it; FSDP2 does not support it.",
    "fsdp_use_orig_params": "Remove it; FSDP2 always keeps the original parameters.",
    "fsdp_sync_module_states": "Remove it; FSDP2 does not need it.",
}


def read_config(source: str | Path) -> Section:
    """Read an Accelerate config from a file or a template's name; raise a TemplateError if neither exists."""
    path = Path(source)
    with contextlib.suppress(TemplateError):
        path = find_file("accelerate_configs", source)
    # Not every template has a file, so accept the path that its file would have.
    if path.parent.name in ("", "accelerate_configs") and not path.exists():
        return dict(yaml.safe_load(render(find_template(path.stem))))
    return read_yaml(path, TemplateError, "`hf-fsdp config render` writes a valid config.")


def find_faults(config: Section, model_classes: Collection[str] | None = None) -> list[str]:
    """Return all faults of a parsed config, each with the value and what to change.

    `model_classes` are the names of the classes of a model's modules. If they are given, a class to wrap that is not among
    them is also a fault.
    """
    fsdp = _with_prefix(config.get("fsdp_config"), "fsdp_")
    parallel = _with_prefix(config.get("parallelism_config"), "parallelism_config_")
    return [
        *_check_keys(config, fsdp, parallel),
        *_check_launch(config),
        *find_unsupported(
            {key.removeprefix("parallelism_config_"): value for key, value in parallel.items()},
            config.get("mixed_precision"),
        ),
        *_check_version(fsdp, parallel),
        *_check_choices(fsdp),
        *_check_wrapping(fsdp, model_classes),
        *_check_saving_and_loading(fsdp),
        *_check_mesh(config, fsdp, parallel),
    ]


def find_unsupported(sizes: Mapping[str, object], precision: str | None) -> Iterator[str]:
    """Yield an error for each unsupported kind of parallelism in `sizes` ({"tp_size": 2}), and for an unsupported precision."""
    for key, kind in UNSUPPORTED_PARALLELISM.items():
        if str(sizes.get(key) or 1) != "1":
            yield (
                f"{kind} parallelism is not supported, but {key} is {sizes[key]}. Remove it from parallelism_config, and shard "
                f"over all ranks with dp_shard_size."
            )
    if precision == "fp8":
        yield "mixed_precision is fp8, which has never been tested with this package. Set it to bf16."


def build_on_meta(model: str, trust_remote_code: bool = False) -> "PreTrainedModel":
    """Build a model on meta from the config that `find_config` finds; raise a TemplateError if that is not possible."""
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(find_config(model), trust_remote_code=trust_remote_code)
        with torch.device("meta"):  # init_empty_weights would briefly allocate each parameter
            return model_class.build(config, trust_remote_code=trust_remote_code)
    except (LoadError, OSError, ValueError) as error:
        raise TemplateError(f"Cannot read the config of {model}: {summarize(error, 'line')}") from error


def _with_prefix(section: object, prefix: str) -> Section:
    # Accelerate adds the prefix to FSDP keys that lack it.
    if not isinstance(section, dict):
        return {}
    return {prefix + str(key).removeprefix(prefix): value for key, value in section.items()}


def _check_keys(config: Section, fsdp: Section, parallel: Section) -> Iterator[str]:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    # Accelerate merges fsdp_config and parallelism_config into the launcher's arguments, so the launcher defines their keys.
    arguments = vars(launch_command_parser().parse_args(["script.py"]))
    for place, keys, known in (
        ("", config, {*ClusterConfig.__dataclass_fields__, "dynamo_backend", "fp16"}),  # the last two are deprecated
        (" in fsdp_config", fsdp, {key for key in arguments if key.startswith("fsdp_")} | {"fsdp_ignored_modules"}),
        (" in parallelism_config", parallel, {key for key in arguments if key.startswith("parallelism_config_")}),
    ):
        for key in sorted(set(map(str, keys)) - known):
            close = get_close_matches(key, known, n=1)
            yield f"Accelerate has no key {key}{place}. " + (f"Did you mean {close[0]}?" if close else "Remove it.")


def _check_launch(config: Section) -> Iterator[str]:
    from accelerate.utils import PrecisionType

    if config.get("distributed_type") != "FSDP":
        yield f"distributed_type is {config.get('distributed_type')}, so ranks would not shard the model. Set it to FSDP."
    precision = str(config.get("mixed_precision", "no"))
    if precision not in (*PrecisionType.list(), "False"):  # YAML reads an unquoted no as False
        yield f"mixed_precision is {precision}. Set it to one of 'no', fp16, bf16."
    nodes, ranks = config.get("num_machines", 1), config.get("num_processes")
    for key, count in (("num_machines", nodes), ("num_processes", ranks)):
        if isinstance(count, int) and count < 1:
            yield f"{key} is {count}. Set it to at least 1."
    if isinstance(nodes, int) and nodes > 1 and not config.get("main_process_ip"):
        yield (
            f"num_machines is {nodes} and main_process_ip is not set, so the nodes would wait forever. Set "
            f"main_process_ip to the address of node 0, or to '{MAIN_PROCESS_IP}' if every launch passes that flag."
        )
    if isinstance(nodes, int) and isinstance(ranks, int) and ranks > 0 and ranks % max(nodes, 1):
        yield (
            f"num_processes is {ranks} and num_machines is {nodes}, but every node needs the same number of ranks. "
            f"Set num_processes to a multiple of num_machines."
        )


def _check_version(fsdp: Section, parallel: Section) -> Iterator[str]:
    chosen = str(fsdp.get("fsdp_version", "1"))
    if chosen == "2":
        for key in sorted(FSDP1_ONLY.keys() & fsdp.keys()):
            yield f"{key} is an FSDP1 key, but fsdp_version is 2. {FSDP1_ONLY[key]}"
        reshard = str(fsdp.get("fsdp_reshard_after_forward", "true")).lower()
        if reshard not in ("true", "false"):
            yield f"fsdp_reshard_after_forward is {reshard}. Set it to true or false with FSDP2."
    elif chosen == "1":
        if parallel:
            yield "parallelism_config needs fsdp_version 2. With FSDP1, set fsdp_sharding_strategy: HYBRID_SHARD."
        if is_true(fsdp.get("fsdp_activation_checkpointing_offload", False)):
            yield "fsdp_activation_checkpointing_offload needs fsdp_version 2. Remove it, or use FSDP2."
    else:
        yield f"fsdp_version is {chosen}. Set it to 1 or 2."


def _check_choices(fsdp: Section) -> Iterator[str]:
    from accelerate.utils import constants

    for key in ("sharding_strategy", "auto_wrap_policy", "backward_prefetch", "state_dict_type"):
        value, choices = str(fsdp.get(f"fsdp_{key}")), getattr(constants, f"FSDP_{key.upper()}")
        if value != "None" and value.upper() not in choices and not value.isdigit():
            yield f"fsdp_{key} is {value}. Set it to one of {', '.join(choices)}."


def _check_wrapping(fsdp: Section, model_classes: Collection[str] | None) -> Iterator[str]:
    policy = str(fsdp.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper()
    if policy == "NO_WRAP":
        yield (
            "fsdp_auto_wrap_policy is not set, so the model is a single FSDP unit and every rank gathers all of it at "
            "once. Set it to TRANSFORMER_BASED_WRAP."
        )
    if policy == "SIZE_BASED_WRAP" and not fsdp.get("fsdp_min_num_params", 1):
        yield "fsdp_min_num_params is 0, which turns wrapping off. Set it to 100000000, for example."
    names = fsdp.get("fsdp_transformer_layer_cls_to_wrap") or ""
    if not isinstance(names, str) or " " in names:
        yield (
            f"fsdp_transformer_layer_cls_to_wrap is {names!r}, which Accelerate cannot read. Write the classes as one "
            f"string without spaces, such as LlamaAttention,LlamaMLP."
        )
    elif model_classes is not None:
        yield from find_unknown_layers(names, model_classes)


def find_unknown_layers(names: str, model_classes: Collection[str]) -> Iterator[str]:
    """Yield an error for each of the comma-separated layer classes to wrap that a model does not have."""
    layers = ", ".join(sorted(name for name in model_classes if name.endswith(("Layer", "Block"))))
    for name in names.split(","):
        if name and name not in model_classes:
            yield (
                f"fsdp_transformer_layer_cls_to_wrap is {name}, but the model has no such class. Remove the key to use "
                f"the class that the model declares, or choose from {layers}."
            )


def _check_saving_and_loading(fsdp: Section) -> Iterator[str]:
    state_dict_type = str(fsdp.get("fsdp_state_dict_type", "SHARDED_STATE_DICT")).upper()
    if state_dict_type == "FULL_STATE_DICT":
        yield (
            "fsdp_state_dict_type is FULL_STATE_DICT, which gathers model and optimizer on rank 0 at every save and can "
            "time out. Set it to SHARDED_STATE_DICT; the full model is exported at the end in any case."
        )
    if state_dict_type == "LOCAL_STATE_DICT":
        yield (
            "fsdp_state_dict_type is LOCAL_STATE_DICT, so a run could not resume on a different number of ranks. "
            "Set it to SHARDED_STATE_DICT."
        )
    if is_true(fsdp.get("fsdp_cpu_ram_efficient_loading", False)):  # transformers issue 43749
        yield (
            "fsdp_cpu_ram_efficient_loading is true, but transformers ignores it since version 5: every rank loads the "
            "full model. Set it to false and load with hf_fsdp_recipes.load_model, as recipes/sft.py does."
        )


def _check_mesh(config: Section, fsdp: Section, parallel: Section) -> Iterator[str]:
    strategy = str(fsdp.get("fsdp_sharding_strategy", "")).upper()
    if "HYBRID" in strategy and config.get("num_machines", 1) == 1:
        yield f"{strategy} keeps one replica per node, but num_machines is 1. Use FULL_SHARD or SHARD_GRAD_OP."
    sizes = {key.removeprefix("parallelism_config_"): parallel[key] for key in parallel if key.endswith("_size")}
    ranks, product = config.get("num_processes"), prod(map(int, sizes.values()))
    if parallel and isinstance(ranks, int) and product != ranks:
        yield (
            f"The sizes {sizes} in parallelism_config multiply to {product}, but num_processes is {ranks}. Set "
            f"dp_replicate_size to the number of nodes and dp_shard_size to the ranks per node."
        )
