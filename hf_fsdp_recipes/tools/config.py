"""`hf-fsdp config check`: reports all faults of an Accelerate config at once."""

from collections.abc import Iterator
from difflib import get_close_matches
from math import prod
from typing import Annotated

from typer import Argument

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.tools.files import Settings, find_file, read_yaml


def check(
    name: Annotated[str, Argument(help="An Accelerate config file, or a template.")],
) -> None:
    """Report all faults of a config at once. The exit status is 1 if there are any."""
    file = find_file("template", name)
    faults = find_faults(read_yaml(file))
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ToolError("\n  - ".join([f"{file} has {count}:", *faults]))
    print(f"{file}: no faults found")


def find_faults(config: Settings) -> list[str]:
    """Return the faults of a parsed config.

    Accelerate silently ignores them, or finds them only after the ranks have started.
    """
    sections = {name: config.get(name) or {} for name in ("fsdp_config", "parallelism_config")}
    faults = [
        f"{name} is {section!r}, and Accelerate ignores it. Write a line for each setting."
        for name, section in sections.items()
        if not isinstance(section, dict)
    ]
    if faults:
        return faults
    # Accelerate adds a missing prefix `fsdp_` to the settings of fsdp_config.
    # It adds none to those of parallelism_config.
    fsdp = {
        f"fsdp_{str(name).removeprefix('fsdp_')}": value
        for name, value in sections["fsdp_config"].items()
    }
    parallel = sections["parallelism_config"]
    faults = [
        *_find_unknown(config, fsdp, parallel),
        *_check_launch(config),
        *_check_sizes(config, parallel),
    ]
    if fsdp or config.get("distributed_type") == "FSDP":
        faults.extend(_check_fsdp(fsdp))
    return faults


def _find_unknown(config: Settings, fsdp: Settings, parallel: Settings) -> Iterator[str]:
    from hf_fsdp_recipes.upstream.accelerate_internals import ClusterConfig, launch_command_parser

    # Accelerate merges both sections into the launcher's arguments, so a setting must have the
    # name of one of these arguments.
    arguments = ["fsdp_ignored_modules", *vars(launch_command_parser().parse_args(["script.py"]))]
    for section, known in (
        (config, ClusterConfig.__dataclass_fields__),
        (fsdp, [name for name in arguments if name.startswith("fsdp_")]),
        (parallel, [name for name in arguments if name.startswith("parallelism_config_")]),
    ):
        for name in sorted({*map(str, section)}.difference(known)):
            close = get_close_matches(name, known, 1, cutoff=0.5)
            cure = f"Did you mean {close[0]}?" if close else "Remove it."
            yield f"Accelerate has no setting {name}. {cure}"


def _check_launch(config: Settings) -> Iterator[str]:
    kind = config.get("distributed_type")
    precision = config.get("mixed_precision", "no")
    if config.get("fsdp_config") and kind != "FSDP":
        yield f"distributed_type is {kind}, so fsdp_config is ignored. Set it to FSDP."
    if precision not in ("no", "fp16", "bf16"):
        yield f"mixed_precision is {precision}. Set bf16, fp16 or 'no', in quotes."
    if config.get("num_machines", 1) != 1 and not config.get("main_process_ip"):
        yield (
            "main_process_ip is missing, so the nodes would wait for each other. Set the address "
            "of node 0."
        )


def _check_sizes(config: Settings, parallel: Settings) -> Iterator[str]:
    nodes = config.get("num_machines", 1)
    ranks = config.get("num_processes", 1)
    sizes = {
        "dp_replicate_size": parallel.get("parallelism_config_dp_replicate_size", 1),
        "dp_shard_size": parallel.get("parallelism_config_dp_shard_size", 1),
    }
    numbers = {"num_machines": nodes, "num_processes": ranks, **sizes}
    wrong = {
        name: number for name, number in numbers.items() if type(number) is not int or number < 1
    }
    if wrong:
        yield f"{wrong}: set whole numbers from 1."
    elif ranks % nodes:
        yield (
            f"num_processes {ranks} is no multiple of num_machines {nodes}. Give each node the "
            "same number of ranks."
        )
    elif parallel and prod(sizes.values()) != ranks:
        yield (
            f"{sizes} do not multiply to num_processes {ranks}. Set the numbers of nodes and of "
            "ranks on each node."
        )


def _check_fsdp(fsdp: Settings) -> Iterator[str]:
    version = fsdp.get("fsdp_version", "1 by default")
    if version != 2:
        yield (
            f"fsdp_version is {version}. Set `fsdp_version: 2`; `accelerate to-fsdp2` converts a "
            "config for FSDP1."
        )
    if "fsdp_sharding_strategy" in fsdp:
        yield (
            "fsdp_sharding_strategy is ignored by FSDP2. Remove it; fsdp_reshard_after_forward is "
            "the strategy."
        )
    state = fsdp.get("fsdp_state_dict_type")
    if state not in (None, "SHARDED_STATE_DICT"):
        yield (
            f"fsdp_state_dict_type is {state}, which gathers the model in each save. Set "
            "SHARDED_STATE_DICT."
        )
    if str(fsdp.get("fsdp_cpu_ram_efficient_loading", True)).lower() != "false":
        yield (
            "fsdp_cpu_ram_efficient_loading is not false: it needs full copies in host memory, "
            "load_model needs none."
        )
    policy = fsdp.get("fsdp_auto_wrap_policy")
    if policy not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
        yield (
            f"fsdp_auto_wrap_policy is {policy}, which gathers the whole model at once. Set "
            "TRANSFORMER_BASED_WRAP."
        )
    layers = fsdp.get("fsdp_transformer_layer_cls_to_wrap") or ""
    if not isinstance(layers, str) or " " in layers:
        yield (
            f"fsdp_transformer_layer_cls_to_wrap is {layers!r}. Write names with commas, without "
            "spaces."
        )
