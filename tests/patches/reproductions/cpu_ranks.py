"""Accelerate ignores an FSDP config on CPU ranks: they train as plain data parallel.

There is no warning.

accelerate launch --use_cpu --num_processes 2 --use_fsdp --fsdp_version 2 cpu_ranks.py
"""

from accelerate import Accelerator

accelerator = Accelerator()
trained_as = accelerator.distributed_type
assert trained_as == "FSDP", f"an FSDP config trains as {trained_as}"
