"""The import path of version 1.0 for `read_manifest`, which copies of recipes/sft.py call."""

from hf_fsdp_recipes.saving.directory import read_manifest

__all__ = ["read_manifest"]
