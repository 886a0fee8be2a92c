"""`hf-fsdp sft`: runs the recipe script on all ranks with Accelerate's own launcher, in this process."""

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from hf_fsdp_recipes.tools.files import find_file, read_yaml, shipped_directory

# Options that both the launcher and the script have. They are passed to the script, as in `trl sft`.
SHARED_OPTIONS = {"debug", "gradient_accumulation_steps"}
# Pass on the signal that Slurm sends before it ends a job, and give the ranks ten minutes to write a checkpoint.
PREEMPTION = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
}
CPU_ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",  # the launcher passes on use_cpu only without FSDP
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # Return freed memory to the system at once. By default, glibc keeps freed blocks of up to 32 MB, such as those of FSDP
    # units, so that the peak hardly falls as ranks are added. Source: mallopt(3).
    "MALLOC_MMAP_THRESHOLD_": "1048576",
}


def sft(
    context: typer.Context,
    accelerate_config: Annotated[str, typer.Option("--accelerate_config", help="A template, or an Accelerate config.")],
    config: Annotated[Optional[str], typer.Option("--config", help="A shipped recipe, or a file.")] = None,
) -> None:
    """Fine-tune a model: all weights, LoRA or QLoRA.

    Options of `accelerate launch`, such as `--num_processes 2`, and fields of the recipe, such as `--learning_rate 1e-4`, can
    follow in any order. The fields are those of TRL's SFTConfig, ScriptArguments and ModelConfig, and those in docs/recipes.md.
    """
    recipe = ["--config", str(find_file("recipe", config))] if config else []
    template = find_file("template", accelerate_config)
    launch(shipped_directory("recipe") / "sft.py", template, [*recipe, *context.args])


def launch(script: Path, template: Path, arguments: Sequence[str]) -> None:
    """Run a script on all ranks, and return when all of them have succeeded.

    Args:
        script: the Python file that each rank runs.
        template: an Accelerate config file.
        arguments: options of the launcher and of the script, in any order.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from hf_fsdp_recipes.patches import HIDDEN_DEVICES

    os.environ.update(PREEMPTION | os.environ)
    if read_yaml(template).get("use_cpu"):
        os.environ.update(CPU_ENVIRONMENT | os.environ | dict.fromkeys(HIDDEN_DEVICES, ""))
    parser = launch_command_parser()
    own = {name for action in parser._actions if action.dest not in SHARED_OPTIONS for name in action.option_strings}
    for_launcher, for_script = split_arguments(arguments, own)
    try:
        launch_command(parser.parse_args(["--config_file", str(template), *for_launcher, str(script), *for_script]))
    except ChildFailedError:  # the ranks have printed why; torch has logged which rank failed first
        sys.exit(1)


def split_arguments(arguments: Sequence[str], launcher_options: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's arguments and the script's. A value stays with the option before it."""
    for_launcher: list[str] = []
    for_script: list[str] = []
    target = for_script
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") or name in launcher_options:
            target = for_launcher if name in launcher_options else for_script
        target.append(argument)
    return for_launcher, for_script
