"""Runs the recipe script on all ranks.

`hf-fsdp sft` runs it in this process, rehearsals and sweeps run it in another one.
"""

import logging
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic, sleep

import psutil
from typer import Context

from hf_fsdp_recipes.errors import ToolError, explained
from hf_fsdp_recipes.tools.files import (
    RecipeOption,
    TemplateOption,
    find_file,
    shipped_directory,
)

# Options that both the launcher and the script have. As in `trl sft`, the script gets them.
SHARED_OPTIONS = {"debug", "gradient_accumulation_steps"}
# Let torchrun pass on the signal that Slurm sends before a job ends.
# Give the ranks ten minutes to write a checkpoint.
PREEMPTION = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
}
CPU_ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",  # with FSDP, the launcher does not pass on use_cpu
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # Return freed memory to the system at once. By default, glibc keeps freed blocks of up to
    # 32 MB, such as those of FSDP units, so the memory peak would hardly fall as ranks are added.
    # Source: mallopt(3).
    "MALLOC_MMAP_THRESHOLD_": "1048576",
}
ERROR = re.compile(r"(?m)^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)")
# Words of the launchers' summaries, and of ranks that lost another rank.
NOT_THE_CAUSE = ("ChildFailedError", "CalledProcessError", "by peer")
REFUSED = "accelerate launch fails with {} or an option (see `hf-fsdp config check`)"


def sft(context: Context, accelerate_config: TemplateOption, config: RecipeOption = None) -> None:
    """Fine-tune a model: all weights, LoRA or QLoRA.

    Options of `accelerate launch`, such as `--num_processes 2`, and fields of the recipe, such as
    `--learning_rate 1e-4`, can follow in any order. The fields are those of TRL's SFTConfig,
    ScriptArguments and ModelConfig, and those in docs/recipes.md.
    """
    from hf_fsdp_recipes.upstream.accelerate_internals import launch_command
    from hf_fsdp_recipes.upstream.patches import HIDDEN_DEVICES
    from hf_fsdp_recipes.upstream.torch_internals import ChildFailedError, SignalException

    recipe = ["--config", str(find_file("recipe", config))] if config else []
    template = find_file("template", accelerate_config)
    os.environ.update(PREEMPTION | os.environ)
    launch = read_launch(template, recipe + context.args)
    if is_on_cpu(launch):
        os.environ.update(CPU_ENVIRONMENT | os.environ | dict.fromkeys(HIDDEN_DEVICES, ""))
    for fault in find_missing_devices(launch):
        raise ToolError(fault)
    with explained(ToolError, REFUSED.format(template)):
        try:
            launch_command(parse_launch(template, recipe + context.args))
        except (ChildFailedError, SignalException):
            # The ranks have printed why; torch has logged which rank failed first.
            sys.exit(1)


def read_launch(template: Path, arguments: Sequence[str]) -> Namespace:
    """Return the values with which `accelerate launch` starts the script.

    A template's value counts where the arguments have none. `nproc_per_node`, the number of ranks
    on this node, is added. Raises a ToolError if `accelerate launch` refuses any of them, or would
    start fewer ranks.
    """
    from hf_fsdp_recipes.upstream.accelerate_internals import validate_launch_command

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it logs notes about launching
    with explained(ToolError, REFUSED.format(template)):
        launch = validate_launch_command(parse_launch(template, arguments))[0]
        launch.nproc_per_node = launch.num_processes // launch.num_machines
    ranks = launch.num_processes
    nodes = launch.num_machines
    if ranks < 1 or ranks % nodes:
        raise ToolError(f"num_processes is {ranks}. Set it to a multiple of num_machines, {nodes}.")
    if ranks > 1 and (launch.cpu or not (launch.use_fsdp or launch.multi_gpu)):
        raise ToolError(
            f"with {template}, accelerate launch would start 1 rank instead of {ranks}. Set "
            "distributed_type to FSDP or MULTI_GPU."
        )
    return launch


def is_on_cpu(launch: Namespace) -> bool:
    """Return whether the template or the environment asks for CPU ranks."""
    from accelerate.utils import parse_flag_from_env

    return launch.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")


def find_missing_devices(launch: Namespace) -> Iterator[str]:
    """Generate the fault of a node that has fewer accelerators than ranks.

    Accelerate would train on the CPU if there is none, and only torch would name a missing one.
    """
    import torch

    num_devices = torch.accelerator.device_count()
    if num_devices < launch.nproc_per_node and not is_on_cpu(launch):
        yield (
            f"{launch.nproc_per_node} ranks need an accelerator each, and this node has "
            f"{num_devices}. Start fewer ranks (--num_processes), get more accelerators, or choose "
            "the template cpu to train on CPU ranks."
        )


def parse_launch(template: Path, arguments: Sequence[str]) -> Namespace:
    """Return the parsed arguments of `accelerate launch`.

    `training_script_args` has the script's own arguments. Options of the launcher and of the script
    can be in any order. A value stays with the option before it.
    """
    from hf_fsdp_recipes.upstream.accelerate_internals import launch_command_parser

    parser = launch_command_parser()
    launcher_options = {
        name
        for action in parser._actions
        if action.dest not in SHARED_OPTIONS
        for name in action.option_strings
    }
    for_launcher = ["--config_file", str(template)]
    for_script = [str(shipped_directory("recipe") / "sft.py")]
    target = for_script
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in launcher_options:
            target = for_launcher
        elif name.startswith("--"):
            target = for_script
        target.append(argument)
    return parser.parse_args(for_launcher + for_script)


def run_recipe(
    template: Path,
    arguments: list[str],
    log: Path,
    is_done: Callable = lambda: False,
    limit_seconds: float = inf,
) -> int | None:
    """Run `hf-fsdp sft` until it ends, `is_done()` is true, or the time limit is reached.

    Then kill what still runs. `log` gets the command's output. Returns the exit status, or None if
    the command was still running.
    """
    command = [
        sys.executable,
        "-m",
        "hf_fsdp_recipes.cli",
        "sft",
        f"--accelerate_config={template}",
        "--main_process_port=0",
    ]
    # Then `finally` kills the ranks, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    deadline = monotonic() + limit_seconds
    with log.open("w") as output:
        process = psutil.Popen(
            command + arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        while process.poll() is None and monotonic() < deadline and not is_done():
            sleep(0.1)
        return process.poll()
    finally:
        kill_tree(process)


def kill_tree(launcher: psutil.Popen) -> None:
    """Kill the launcher and its ranks.

    Each rank is killed on its own, because torchrun starts them in separate sessions.
    """
    with suppress(psutil.NoSuchProcess):
        for member in [launcher, *launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    launcher.wait()


def find_error(log: str) -> str:
    """Return the line of a run's output that says why it failed, or an empty string."""
    for line in reversed(ERROR.findall(log)):
        if not any(words in line for words in NOT_THE_CAUSE):
            return line.strip()
    return ""
