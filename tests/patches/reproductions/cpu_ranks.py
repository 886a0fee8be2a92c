"""Accelerate ignores an FSDP config on CPU ranks: the ranks train as plain data parallel, without a warning.

accelerate launch --use_cpu --num_processes 2 --use_fsdp --fsdp_version 2 cpu_ranks.py
"""

from accelerate import Accelerator

accelerator = Accelerator()
assert accelerator.distributed_type == "FSDP", (
    f"an FSDP config trains as {accelerator.distributed_type}"
)
