"""Runs Accelerate's launcher in this process, which thus gets the launcher's signal handling and exit status."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from accelerate.commands.launch import launch_command, launch_command_parser

from hf_fsdp_recipes.configs.validate import read_config
from hf_fsdp_recipes.errors import RecipeError

# Both the launcher and the scripts have these options. They are passed to the scripts, as in `trl sft`.
SHARED_OPTIONS = {"debug", "gradient_accumulation_steps"}
# Give a preempted run time to write its checkpoint, and forward the signal that Slurm sends before it ends a job.
PREEMPTION = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
}


def launch_script(script: Path, template: Path, arguments: Sequence[str]) -> None:
    """Run a script on all ranks and return when all of them have succeeded.

    `arguments` may hold options of the launcher and of the script in any order.
    """
    os.environ.update(PREEMPTION | os.environ)
    parser = launch_command_parser()
    known = {name for action in parser._actions if action.dest not in SHARED_OPTIONS for name in action.option_strings}
    for_launcher, for_script = split_arguments(arguments, known)
    options = parser.parse_args(["--config_file", str(template), *for_launcher, str(script), *for_script])
    config = read_config(template)
    num_processes = config.get("num_processes") if options.num_processes is None else options.num_processes
    if num_processes is not None and num_processes < 1:
        raise RecipeError(f"num_processes is {num_processes}. Set it to the number of GPUs of all nodes, at least 1.")
    if config.get("use_cpu"):
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # otherwise Accelerate would use the machine's accelerator
    launch_command(options)


def split_arguments(arguments: Sequence[str], launcher_options: Collection[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those for the launcher and those for the script. A value goes where the option before it goes."""
    for_launcher: list[str] = []
    for_script: list[str] = []
    target = for_script
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") or name in launcher_options:
            target = for_launcher if name in launcher_options else for_script
        target.append(argument)
    return for_launcher, for_script
