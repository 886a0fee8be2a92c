"""Names of Accelerate that are not in its documentation, and why each is needed."""

import torch
from accelerate.commands.config.config_args import ClusterConfig  # the settings of a config file
from accelerate.commands.launch import (
    _validate_launch_command as validate_launch_command,  # reads the config file into the arguments
)
from accelerate.commands.launch import (
    launch_command,  # runs `accelerate launch` in this process
    launch_command_parser,  # the arguments of `accelerate launch`
)
from accelerate.state import is_initialized  # whether an Accelerator exists
from accelerate.utils.launch import prepare_multi_gpu_env  # what the launcher tells its ranks

# {mixed precision in a config file: dtype}
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
