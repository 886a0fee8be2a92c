"""Mends size-based wrapping (`SIZE_BASED_WRAP`), which otherwise fails on today's stack.

Accelerate's FSDP2 policy picks module lists, which have no forward and which FSDP2 refuses, and the whole
decoder, whose final norm Accelerate then shards a second time together with the head. And under both versions
the output head gets a unit of its own, while TRL multiplies by the head's weight without calling the head, so
it would find a shard there. Lists and the decoder are skipped, and the head stays with the unit that is whole
when it is needed. Wrapping by layer class is untouched.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `fsdp2_prepare_auto_wrap_policy`; torch 2.13
`fsdp/_fully_shard/_fsdp_init.py`, `_validate_module`; trl 1.16 `trainer/utils.py`, `_fused_forward`.
"""

import functools
import inspect
from importlib.metadata import version
from typing import Any

import torch

from hf_fsdp_recipes.errors import TemplateError

_is_installed = False


def install() -> None:
    """Patch Accelerate's size-based policies. Idempotent; no collective.

    Raises:
        TemplateError: the place has moved.
    """
    global _is_installed
    if _is_installed:
        return
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    make_policy: Any = getattr(fsdp_utils, "fsdp2_prepare_auto_wrap_policy", None)
    is_there = make_policy is not None and hasattr(fsdp_utils, "_find_final_norm")
    if not is_there or list(inspect.signature(make_policy).parameters) != ["fsdp2_plugin", "model"]:
        raise TemplateError(
            f"accelerate {version('accelerate')} has no fsdp_utils.fsdp2_prepare_auto_wrap_policy(fsdp2_plugin, model) or "
            f"no _find_final_norm. Rule: tried with accelerate 1.15. Remedy: install that, or wrap by layer class."
        )

    @functools.wraps(make_policy)
    def make_policy_for_modules_that_run(fsdp2_plugin: Any, model: torch.nn.Module) -> Any:
        policy = make_policy(fsdp2_plugin, model)
        if policy is None or not _is_size_based(fsdp2_plugin.auto_wrap_policy):
            return policy
        tail = [*_heads(model), *filter(None, [fsdp_utils._find_final_norm(model)])]
        return lambda module: _may_be_a_unit(module, tail) and policy(module)

    set_policy = FullyShardedDataParallelPlugin.set_auto_wrap_policy

    @functools.wraps(set_policy)
    def set_policy_without_heads(self: Any, model: torch.nn.Module) -> None:
        is_size_based = _is_size_based(self.auto_wrap_policy)
        set_policy(self, model)
        if is_size_based and self.fsdp_version == 1 and self.auto_wrap_policy is not None:
            self.auto_wrap_policy = _without(self.auto_wrap_policy, _heads(model))

    fsdp_utils.fsdp2_prepare_auto_wrap_policy = make_policy_for_modules_that_run
    FullyShardedDataParallelPlugin.set_auto_wrap_policy = set_policy_without_heads
    _is_installed = True


def _is_size_based(policy: Any) -> bool:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    return getattr(policy, "func", policy) is size_based_auto_wrap_policy


def _heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the output head and, where the two are tied, the input embedding."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if head is None:
        return []
    is_tied = embedding is not None and getattr(embedding, "weight", None) is getattr(head, "weight", None)
    return [head, embedding] if is_tied else [head]


def _may_be_a_unit(module: torch.nn.Module, tail: list[torch.nn.Module]) -> bool:
    """Tell whether FSDP2 may shard a module by itself; what holds part of the tail is sharded around that."""
    if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
        return False
    return all(inner is not one for inner in module.modules() for one in tail)


def _without(policy: Any, kept_out: list[torch.nn.Module]) -> Any:
    """Keep modules out of an FSDP1 policy, which is asked twice: whether to look inside, and whether to wrap."""

    def policy_without(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if any(module is one for one in kept_out):
            return False
        return policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

    return policy_without
