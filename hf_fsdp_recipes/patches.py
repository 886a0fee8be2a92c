"""The import path of version 1.0 for `enable_cpu_ranks`, which copies of recipes/sft.py call."""

from hf_fsdp_recipes.upstream.patches import enable_cpu_ranks

__all__ = ["enable_cpu_ranks"]
