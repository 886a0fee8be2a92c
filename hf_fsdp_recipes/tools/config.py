"""`hf-fsdp config check`: reports all faults of an Accelerate config at once."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated

from typer import Argument

from hf_fsdp_recipes.errors import ToolError
from hf_fsdp_recipes.settings import Settings, read_settings
from hf_fsdp_recipes.tools.files import find_file

# {setting of fsdp_config: (its good values, what to do about others)}
NEEDED = {
    "fsdp_version": ("2", "Set 2; `accelerate to-fsdp2` converts a config for FSDP1."),
    "fsdp_sharding_strategy": (
        "None",
        "It is ignored by FSDP2. Remove it; fsdp_reshard_after_forward is the strategy.",
    ),
    "fsdp_state_dict_type": (
        "None SHARDED_STATE_DICT",
        "Each save would gather the model. Set SHARDED_STATE_DICT.",
    ),
    "fsdp_cpu_ram_efficient_loading": (
        "False",
        "Unless it is false, it needs full copies in host memory. load_model needs none.",
    ),
    "fsdp_auto_wrap_policy": (
        "TRANSFORMER_BASED_WRAP SIZE_BASED_WRAP",
        "The whole model would be gathered at once. Set TRANSFORMER_BASED_WRAP.",
    ),
}


def check(
    name: Annotated[str, Argument(help="An Accelerate config file, or a template.")],
) -> None:
    """Report all faults of a config at once. The exit status is 1 if there are any."""
    file = find_file("template", name)
    faults = list(find_faults(read_settings(file)))
    if faults:
        raise ToolError("\n  - ".join([f"{file} has faults:", *faults]))
    print(f"{file}: no faults found")


def find_faults(config: Settings) -> Iterator[str]:
    """Yield the faults of a parsed config that Accelerate ignores, or does not name."""
    fsdp = config.get("fsdp_config") or {}
    parallel = config.get("parallelism_config") or {}
    for section in (fsdp, parallel):
        if not isinstance(section, dict):
            yield f"{section!r} is ignored by Accelerate. Write a line for each setting."
            return
    # Accelerate adds a missing prefix `fsdp_` to the settings of fsdp_config.
    # It adds none to those of parallelism_config.
    fsdp = {f"fsdp_{str(name).removeprefix('fsdp_')}": value for name, value in fsdp.items()}
    kind = config.get("distributed_type")
    yield from _find_unknown(config, fsdp, parallel)
    if fsdp and kind != "FSDP":
        yield f"distributed_type is {kind}, so fsdp_config is ignored. Set it to FSDP."
    if config.get("num_machines", 1) != 1 and not config.get("main_process_ip"):
        yield "main_process_ip is missing, so the nodes would wait. Set the address of node 0."
    if fsdp or kind == "FSDP":
        for name, (allowed, cure) in NEEDED.items():
            value = str(fsdp.get(name))
            if value not in allowed.split():
                yield f"{name} is {value}. {cure}"


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
