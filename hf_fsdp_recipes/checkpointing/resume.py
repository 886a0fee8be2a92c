"""The import path of version 1.0 for `find_damage`, which copies of recipes/sft.py call."""

from hf_fsdp_recipes.saving.resume import find_damage

__all__ = ["find_damage"]
