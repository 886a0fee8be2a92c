"""Patches for TRL: `load_model` loads its reference models, so that no rank holds a full one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_fsdp_recipes.patches.accelerate import find_meta_model_loader
from hf_fsdp_recipes.patches.registry import Original, Patch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

# load_model adds itself, because patches cannot import the loading package.
load_hooks: list[Callable[..., torch.nn.Module]] = []


@Patch(
    "trl.models.utils.prepare_fsdp(model, accelerator)",
    feature="loading",
    changes="A reference model from `load_model` is sharded by the template's wrap policy and filled from the checkpoint.",
    reason="TRL shards the reference model as one unit, gathers the full model in each forward and leaves parameters on meta.",
    upstream="to file: `prepare_fsdp` ignores the wrap policy under FSDP2",
    is_copied=True,
)
def _shard_reference(original: Original, model: torch.nn.Module, accelerator: "Accelerator") -> torch.nn.Module:
    loader = find_meta_model_loader(model)
    return original(model, accelerator) if loader is None else loader.prepare_frozen(accelerator, model)


@Patch(
    "trl.trainer.utils.create_model_from_path(model_id, architecture)",
    feature="loading",
    changes="TRL uses `load_model` for models given by name, such as its default reference model.",
    reason="TRL calls `from_pretrained` on every rank, so each rank holds the full model.",
    upstream="to file: under FSDP, DPOTrainer loads the full reference model on every rank",
    is_copied=True,
)
def _load_by_shards(
    original: Original, model_id: str, architecture: "_BaseAutoModelClass | None" = None, **kwargs: Any
) -> torch.nn.Module:
    kwargs.pop("device_map", None)
    return load_hooks[-1](model_id, auto_class=architecture, **({"dtype": "float32"} | kwargs))


@Patch(
    "trl.trainer.utils.hash_module(module)",
    feature="loading",
    changes="In the cache of precomputed reference log probabilities, a model from `load_model` is identified by its files.",
    reason="TRL hashes the values of all parameters, which are on meta until the model is sharded.",
    upstream="to file: `precompute_ref_log_probs` hashes the full reference model on every rank",
    is_copied=True,
)
def _hash_files(original: Original, module: torch.nn.Module) -> str:
    loader = find_meta_model_loader(module)
    return original(module) if loader is None else loader.fingerprint(module)
